"""The loop without Lightning, on a policy small enough for float64."""

from contextlib import nullcontext

import pytest
import torch

from benchmarks.metrics import distance, flatten
from benchmarks.reference import reference_gradient
from benchmarks.replay import ReplayedNative, ReplayedRetain, ReplayedReweight, Tape
from benchmarks.update import Update
from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.sigmas import LinearSigmas
from lightning_modules.flow.transitions import FlowSDE
from lightning_modules.flow.windows import AllButLast, Fraction
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from tests.tiny import TinyPolicy

REWARDS = torch.tensor([[0.1, 0.9, 0.4], [0.8, 0.1, 0.75]], dtype=torch.float64)


def score(rollout):
    return REWARDS[rollout.request.rows.prompt, rollout.request.rows.generation]


def make(policy, **changes):
    settings = {
        "prompts": ["a red circle", "two blue squares"], "generations": 3, "transition": FlowSDE(0.7),
        "sigmas": LinearSigmas(3.0), "num_steps": 4, "window": AllButLast(), "advantage": GroupAdvantage(),
        "micro_batch": 2, "dtype": torch.float64,
    }  # fmt: skip
    return Update(policy, **(settings | changes))


def gradient(policy):
    return flatten(p.grad for p in policy.parameters())


@pytest.mark.parametrize("schedule", [Native, Retain, lambda: Reweight("per_sample"), lambda: Reweight("streaming")])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"groups_in_flight": 2, "micro_batch": 5},
        {"window": Fraction(0.67, draw_per="sample")},
        {"advantage": GroupAdvantage(std="global", clip=None)},
    ],
    ids=["group by group", "two groups at once", "window by sample", "global std"],
)
def test_every_schedule_forms_the_reference_gradient(schedule, changes):
    policy = TinyPolicy(seed=1).double()
    update = make(policy, **changes)
    tape = Tape.record(update(Native(), score).rollouts)
    reference_gradient(update, tape, REWARDS)
    truth = gradient(policy)
    update(schedule(), score)
    assert distance(truth, gradient(policy)).relative_l2 < 1e-12


def test_a_clip_over_the_iteration_waits_for_all_rewards():
    policy = TinyPolicy(seed=1).double()
    update = make(policy, advantage=GroupAdvantage(std="global", clip=0.5))
    tape = Tape.record(update(Native(), score).rollouts)
    native = gradient(policy)
    update(Retain(), score)
    assert distance(native, gradient(policy)).relative_l2 < 1e-12
    wanted = update.advantage(REWARDS.flatten(), update.rows(0, 2).prompt, update.rows(0, 2).generation).table
    assert wanted.abs().max() == 0.5
    assert torch.isnan(tape.latents[:, :, -1]).all(), "the last step is not trained"


def test_what_an_update_returns():
    update = make(TinyPolicy(seed=1).double())
    finished = update(Retain(), score)
    assert torch.equal(finished.rewards, REWARDS)
    assert finished.latents.shape == (6, 3, 4, 4)
    assert not any(step.log_prob.requires_grad for rollout in finished.rollouts for step in rollout.steps)


def test_iterations_differ_in_their_noise_alone():
    update = make(TinyPolicy(seed=1).double())
    first, again, second = (update(Native(), score, iteration=k).latents for k in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.allclose(first, second)


@pytest.mark.parametrize("kind", [ReplayedNative, ReplayedRetain, ReplayedReweight])
def test_a_replayed_schedule_follows_the_tape(kind):
    """On a trajectory that it would never have sampled: that of other noise."""
    policy = TinyPolicy(seed=1).double()
    update = make(policy)
    tape = Tape.record(update(Native(), score, iteration=7).rollouts)
    reference_gradient(update, tape, REWARDS)
    truth = gradient(policy)
    replayed = update(kind().on(tape), score)
    assert distance(truth, gradient(policy)).relative_l2 < 1e-12
    steps = Tape.record(replayed.rollouts)
    assert torch.equal(steps.latents[:, :, :3], tape.latents[:, :, :3])
    assert torch.equal(steps.next_latents[:, :, :3], tape.next_latents[:, :, :3])
    update(Native(), score)
    assert distance(truth, gradient(policy)).relative_l2 > 1e-2, "the comparison can fail"


def test_phases_are_announced():
    seen = []

    def clock(phase):
        seen.append(phase)
        return nullcontext()

    update = make(TinyPolicy(seed=1).double(), micro_batch=None)
    update(Retain(), score, clock=clock)
    group = ["rollout", "update", "backward", "backward", "backward"]
    assert seen == [*group, *group, "update"]

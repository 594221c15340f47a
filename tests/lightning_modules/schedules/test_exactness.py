"""The product's promise: Native, Retain and Reweight compute the same gradient, and it is the right one."""

import copy

import pytest
import torch

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.noise import KeyedNoise
from lightning_modules.flow.transitions import CPS, DanceSDE, FlowSDE, WanSDE
from lightning_modules.flow.windows import AllButLast, Fraction
from lightning_modules.objectives.step_weights import ConstantStepWeights, InverseSensitivity
from lightning_modules.policies.base import Reference
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.types import Rows
from tests.harness import PROMPTS, Update, relative
from tests.lightning_modules.schedules.reference import reference_gradient
from tests.tiny import TinyPolicy

REWARDS = torch.tensor([[0.1, 0.9, 0.4, 0.35], [0.5, 0.5, 0.5, 0.5], [0.8, 0.1, 0.75, 0.2]], dtype=torch.float64)
TRANSITIONS = {
    "flow": (FlowSDE(0.7), 0.7),
    "dance": (DanceSDE(0.3), 0.3),
    "cps": (CPS(0.8), 0.8),
    "cps_gaussian": (CPS(0.8, density="gaussian"), 0.8),
    "wan": (WanSDE(), None),
}
SCHEDULES = {
    "native": lambda: Native(),
    "native_small_batches": lambda: Native(micro_batch=1),
    "retain": lambda: Retain(),
    "reweight_per_sample": lambda: Reweight("per_sample"),
    "reweight_streaming": lambda: Reweight("streaming"),
}


def policies(dtype, beta):
    policy = TinyPolicy(seed=1).to(dtype)
    anchor = TinyPolicy(seed=2).to(dtype).eval() if beta else None
    return policy, anchor


def independent(update, policy, kind, level, anchor, advantage):
    groups, members = update.rewards.shape
    rows = Rows(prompt=torch.arange(groups).repeat_interleave(members), generation=torch.arange(members).repeat(groups))
    draws = KeyedNoise(seed=0, iteration=0, rows=rows, latent_shape=policy.latent_shape)
    shape = (groups, members, *policy.latent_shape)
    trained = update.window.trained(update.num_steps, seed=0, iteration=0, rows=rows).view(groups, members, -1)
    return reference_gradient(
        policy, kind.removesuffix("_gaussian"), level, update.sigmas.tolist(), [policy.encode([p]) for p in PROMPTS],
        draws.initial().view(shape).to(update.dtype), [draws(t).view(shape) for t in range(update.num_steps)], trained,
        update.rewards, update.step_weights.tolist(), beta=update.beta, anchor=anchor, gaussian=kind != "cps",
        eps=advantage.eps, clip=advantage.clip, scale=advantage.std,
    )  # fmt: skip


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("weights", [ConstantStepWeights(), InverseSensitivity()], ids=["constant", "inverse"])
@pytest.mark.parametrize("kind", TRANSITIONS)
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradient_equals_an_independent_reference_in_float64(name, kind, weights, beta):
    transition, level = TRANSITIONS[kind]
    policy, anchor = policies(torch.float64, beta)
    advantage = GroupAdvantage(clip=None)
    update = Update(
        policy, REWARDS, transition=transition, step_weights=weights, beta=beta, advantage=advantage,
        reference=anchor and Reference(anchor), dtype=torch.float64,
    )  # fmt: skip
    expected = independent(update, policy, kind, level, anchor, advantage)
    for micro_batch in (1, 2, 4):
        update.micro_batch = micro_batch
        assert relative(update(SCHEDULES[name]()), expected) < 1e-10


@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("draw_per", ["iteration", "prompt", "sample"])
@pytest.mark.parametrize(
    ("name", "clip"),
    [
        *[(name, clip) for name in ("native", "retain", "reweight_per_sample") for clip in (None, 0.9)],
        ("reweight_streaming", None),  # with a clip that can fire it is refused at start-up: test_reweight.py
    ],
)
def test_windows_that_differ_by_row_and_every_advantage(name, clip, draw_per, std):
    policy, anchor = policies(torch.float64, 0.2)
    advantage = GroupAdvantage(std=std, clip=clip)
    update = Update(
        policy, REWARDS, window=Fraction(0.6, draw_per=draw_per), beta=0.2, reference=Reference(anchor), num_steps=6,
        advantage=advantage, micro_batch=3, groups_in_flight=2, dtype=torch.float64,
    )  # fmt: skip
    ours = update(SCHEDULES[name]())
    assert relative(ours, independent(update, policy, "flow", 0.7, anchor, advantage)) < 1e-10


@pytest.mark.parametrize("beta", [0.0, 0.3])
@pytest.mark.parametrize("kind", TRANSITIONS)
@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_float32_retain_is_native_bit_for_bit_and_reweight_to_rounding(micro_batch, kind, beta):
    policy, anchor = policies(torch.float32, beta)
    update = Update(
        policy, REWARDS, transition=TRANSITIONS[kind][0], beta=beta, reference=anchor and Reference(anchor),
        advantage=GroupAdvantage(clip=None), micro_batch=micro_batch,
    )  # fmt: skip
    native = update(Native())
    latents = update.latents
    retain = update(Retain())
    assert all(torch.equal(a, b) for a, b in zip(native, retain, strict=True))
    assert torch.equal(latents, update.latents)
    for storage in ("per_sample", "streaming"):
        assert relative(update(Reweight(storage)), native) < 1e-5


def test_a_wrong_advantage_or_normaliser_is_seen():
    """The comparison can fail: exchange two rewards, or lose one sample from the normaliser."""
    policy, _ = policies(torch.float64, 0)
    advantage = GroupAdvantage(clip=None)
    update = Update(policy, REWARDS, advantage=advantage, dtype=torch.float64)
    right = independent(update, policy, "flow", 0.7, None, advantage)
    update.rewards = REWARDS[:, [1, 0, 2, 3]]
    assert relative(update(Retain()), right) > 1e-2
    update.rewards = REWARDS
    assert relative([g * 12 / 11 for g in update(Retain())], right) > 1e-2


def test_the_normaliser_counts_what_is_skipped_and_dropped():
    """A group of equal rewards, or a dropped sample, changes nothing of what the others contribute."""
    policy, _ = policies(torch.float64, 0)
    whole = Update(policy, REWARDS, dtype=torch.float64)(Retain())
    alone = Update(policy, REWARDS[[0]], dtype=torch.float64)(Retain())
    last = Update(policy, REWARDS, dtype=torch.float64)
    last.rewards = torch.cat([torch.full((2, 4), 0.5, dtype=torch.float64), REWARDS[[2]]])
    combined = [a / 3 + b for a, b in zip(alone, last(Retain()), strict=True)]
    assert relative(combined, whole) < 1e-12

    dropped = REWARDS.clone()
    dropped[0, 2] = torch.nan
    results = [Update(policy, dropped, dtype=torch.float64)(make()) for make in SCHEDULES.values()]
    for other in results[1:]:
        assert relative(other, results[0]) < 1e-12


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_gradient_and_no_backward_where_all_rewards_are_equal(name):
    policy, _ = policies(torch.float32, 0)
    schedule = SCHEDULES[name]()
    gradient = Update(policy, torch.full((3, 4), 0.1))(schedule)
    assert all(g is None for g in gradient)
    if name in ("native", "retain"):
        assert schedule.backward_rows == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_kl_stays_where_all_rewards_are_equal(name):
    policy, anchor = policies(torch.float64, 1)
    update = Update(policy, torch.full((3, 4), 0.1), beta=0.5, reference=Reference(anchor), dtype=torch.float64)
    expected = independent(update, policy, "flow", 0.7, anchor, update.advantage)
    assert relative(update(SCHEDULES[name]()), expected) < 1e-10


@pytest.mark.parametrize(
    "rewards",
    [
        torch.tensor([[0.2101, 0.2094, 0.2110, 0.2089, 0.2102, 0.2096]]),
        torch.tensor([[85.3, 84.2, 86.1, 85.0, 84.7, 85.9]]),
        torch.tensor([[0.21, 0.21, 0.21, 0.21001, 0.21, 0.21]]),
    ],
    ids=["pickscore", "percent", "fifth_decimal"],
)
def test_streaming_survives_rewards_with_a_large_offset(rewards):
    """float32 gradients against the float64 reference."""
    advantage = GroupAdvantage(clip=None)
    double, single = TinyPolicy(seed=1).double(), TinyPolicy(seed=1)
    truth = Update(double, rewards, advantage=advantage, dtype=torch.float64)
    expected = independent(truth, double, "flow", 0.7, None, advantage)
    for storage in ("streaming", "per_sample"):
        assert relative(Update(single, rewards, advantage=advantage, micro_batch=2)(Reweight(storage)), expected) < 1e-5


@pytest.mark.parametrize("name", SCHEDULES)
def test_bfloat16_weights(name):
    """Every schedule stays within bf16's resolution of the same policy's float64 gradient."""
    policy = TinyPolicy(seed=1).bfloat16()
    exact = copy.deepcopy(policy).double()
    truth = Update(exact, REWARDS, dtype=torch.float64)(Native())
    assert relative(Update(policy, REWARDS)(SCHEDULES[name]()), truth) < 0.1


@pytest.mark.parametrize("name", SCHEDULES)
def test_rows_through_the_policy(name):
    """T + |S| rows per sample for Native, T for the lean schedules, counted by a hook on the policy itself."""
    policy, seen = TinyPolicy(seed=1), []
    policy.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    schedule = SCHEDULES[name]()
    Update(policy, REWARDS[[0, 2]], window=AllButLast(), num_steps=5, micro_batch=2)(schedule)
    per_sample = 5 + 4 if name.startswith("native") else 5
    assert sum(seen) == schedule.forward_rows == 8 * per_sample
    assert schedule.backward_rows == 8 * 4

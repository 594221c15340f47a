"""Several rewards under every schedule: the gradient of the independently computed advantages, in float64."""

import pytest
import torch
from lightning.pytorch import Callback

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.noise import KeyedNoise
from lightning_modules.policies.base import Reference
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.types import Rows
from tests.harness import PROMPTS, relative
from tests.lightning_modules.schedules.reference import reference_gradient
from tests.lightning_modules.several_rewards import CASES, WEIGHTS, SeveralRewards, reference_advantages, table
from tests.loop import fit
from tests.rank_runs import STRATEGIES, TEXTS, Capture, Case, make_module
from tests.ranks import pool
from tests.tiny import TinyPolicy

SCHEDULES = {
    "native": Native,
    "retain": Retain,
    "per_sample": lambda: Reweight("per_sample"),
    "streaming": lambda: Reweight("streaming"),
}


def expected(update, values, applies, anchor=None):
    groups, members = values.shape[:2]
    rows = Rows(prompt=update.prompt, generation=update.generation)
    draws = KeyedNoise(seed=0, iteration=0, rows=rows, latent_shape=update.policy.latent_shape)
    shape = (groups, members, *update.policy.latent_shape)
    advantage = update.advantage
    given = reference_advantages(
        values, applies, update.weights, combine=advantage.combine, std=advantage.std, ddof=advantage.ddof,
        eps=advantage.eps, clip=advantage.clip,
    )  # fmt: skip
    return reference_gradient(
        update.policy, "flow", 0.7, update.sigmas.tolist(), [update.policy.encode([p]) for p in PROMPTS],
        draws.initial().view(shape).to(update.dtype), [draws(t).view(shape) for t in range(update.num_steps)],
        update.window.trained(update.num_steps, seed=0, iteration=0, rows=rows).view(groups, members, -1),
        torch.zeros(groups, members), update.step_weights.tolist(), beta=update.beta, anchor=anchor,
        given=torch.from_numpy(given),
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("combine", ["sum", "advantage", "gdpo"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_gradient_of_several_rewards(name, combine, std, case):
    values, applies = table(case)
    update = SeveralRewards(
        TinyPolicy(seed=1).double(), values, applies, advantage=GroupAdvantage(std=std, clip=None, combine=combine),
        num_steps=3, micro_batch=3, dtype=torch.float64,
    )  # fmt: skip
    assert relative(update(SCHEDULES[name]()), expected(update, values, applies)) < 1e-10


@pytest.mark.parametrize("combine", ["sum", "advantage", "gdpo"])
@pytest.mark.parametrize("name", ["native", "retain", "per_sample"])
def test_with_a_clip_that_fires_and_a_reference_policy(name, combine):
    values, applies = table("routed and dropped")
    anchor = TinyPolicy(seed=2).double().eval()
    update = SeveralRewards(
        TinyPolicy(seed=1).double(), values, applies, advantage=GroupAdvantage(clip=0.8, combine=combine), num_steps=3,
        beta=0.2, reference=Reference(anchor), dtype=torch.float64,
    )  # fmt: skip
    assert relative(update(SCHEDULES[name]()), expected(update, values, applies, anchor)) < 1e-10


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_reference_policys_term_lacks_gdpos_factor(name):
    values, applies = table("whole")
    anchor = TinyPolicy(seed=2).double().eval()
    update = SeveralRewards(
        TinyPolicy(seed=1).double(), values, applies, advantage=GroupAdvantage(clip=None, combine="gdpo"), num_steps=3,
        beta=0.2, reference=Reference(anchor), dtype=torch.float64,
    )  # fmt: skip
    assert relative(update(SCHEDULES[name]()), expected(update, values, applies, anchor)) < 1e-10


def test_float32_streaming_of_rewards_with_large_offsets():
    """PickScore-like and percent-like rewards together, single precision gradients against the float64 reference."""
    values, applies = table("whole")
    options = {"advantage": GroupAdvantage(clip=None, combine="advantage"), "num_steps": 3, "micro_batch": 2}
    truth = SeveralRewards(TinyPolicy(seed=1).double(), values, applies, dtype=torch.float64, **options)
    update = SeveralRewards(TinyPolicy(seed=1), values, applies, **options)
    for storage in ("streaming", "per_sample"):
        assert relative(update(Reweight(storage)), expected(truth, values, applies)) < 1e-5


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_gradient_where_every_reward_is_equal(name):
    values, applies = table("whole")
    values[:] = [0.1, 1 / 3, 85.7]
    for combine in ("advantage", "gdpo"):
        advantage = GroupAdvantage(clip=None, combine=combine)
        update = SeveralRewards(TinyPolicy(seed=1), values, applies, advantage=advantage, num_steps=3)
        assert all(g is None for g in update(SCHEDULES[name]()))


def test_streaming_is_refused_where_weights_let_the_clip_fire():
    values, applies = table("whole")
    options = {"num_steps": 3, "advantage": GroupAdvantage(clip=2.0, combine="advantage")}
    with pytest.raises(ValueError, match=r"combine: advantage and rewards of weights 1, 0\.3, -0\.5; set"):
        SeveralRewards(TinyPolicy(), values, applies, **options)(Reweight("streaming"))
    light = SeveralRewards(TinyPolicy(), values, applies, (0.5, 0.1, -0.1), **options)
    schedule = Reweight()
    light(schedule)
    assert schedule.streaming


def test_a_clip_that_fires_on_unannounced_rewards_is_an_error():
    """Weights of 0.1 were announced, others are scored."""
    values, applies = table("whole")
    update = SeveralRewards(
        TinyPolicy(), values, applies, (9.0, 9.0, 9.0), num_steps=3,
        advantage=GroupAdvantage(clip=2.0, combine="advantage"),
    )  # fmt: skip
    update.weights = (0.1, 0.1, 0.1)
    with pytest.raises(ValueError, match=r"clipped at 2\.0.*storage: per_sample"):
        update(Reweight("streaming"))


# on several ranks


class Given(Callback):
    """Scores by the samples' ids; ``late``: only when asked for them."""

    def __init__(self, late):
        self.late = late

    @property
    def reward_weights(self):
        return dict(zip("xyz", WEIGHTS, strict=True))

    def on_rollout_end(self, trainer, pl_module, samples, scores):
        values, applies = (torch.from_numpy(array) for array in table("routed and dropped"))
        rows = samples.rows
        scores.weights.update(self.reward_weights)

        def fill_in():
            for k, name in enumerate("xyz"):
                scores.applies[name] = applies[rows.prompt, k]
                scores.values[name] = values[rows.prompt, rows.generation, k]

        if self.late:
            scores.pending.append(fill_in)
        else:
            fill_in()


def gradient_of(case, late):
    """Of one iteration, and what it logged."""
    model, capture = make_module(case), Capture()
    model.chunks_ahead = int(late)
    metrics = fit(
        model, 1, root=None, scorer=Given(late), callbacks=[capture], prompts=TEXTS,
        strategy=STRATEGIES[case.strategy](), devices=case.ranks, use_distributed_sampler=False,
    )  # fmt: skip
    return capture.gradients[0], {k: v for k, v in metrics[-1].items() if k.startswith(("reward", "advantage", "drop"))}


def test_sums_held_as_shards_of_groups_that_stay_open_to_the_end():
    """With the global std a factor per reward is known only then."""
    advantage = GroupAdvantage(clip=None, combine="advantage", std="global")
    options = {"advantage": advantage, "micro_batch": 1}
    native, ours = (
        gradient_of(Case(schedule=name, policy="lora", prompts=3, generations=4, options=options), False)[0]
        for name in ("native", "sharded")
    )
    assert ((ours - native).norm() / native.norm()).item() < 5e-6


@pytest.mark.parametrize(
    ("schedule", "strategy", "combine", "late"),
    [
        ("streaming", "ddp", "gdpo", False),
        ("streaming", "fsdp2", "advantage", False),
        ("per_sample", "fsdp2", "gdpo", True),
        ("sharded", "fsdp2", "advantage", False),
    ],
)
def test_two_ranks_give_the_gradient_of_one(schedule, strategy, combine, late):
    advantage = GroupAdvantage(clip=None, combine=combine)
    case = Case(schedule=schedule, policy="lora", prompts=3, generations=4, options={"advantage": advantage})
    alone, logged = gradient_of(case, False)
    for gradient, metrics in pool(2).run(gradient_of, case.on(strategy, 2), late):
        assert ((gradient - alone).norm() / alone.norm()).item() < 5e-6
        assert metrics == logged

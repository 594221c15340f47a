"""Any number of processes, any layout, any strategy: the same gradient, the same trajectories, the same weights."""

from dataclasses import replace

import pytest
import torch

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.windows import Fraction
from lightning_modules.schedules.reweight import Reweight
from tests.harness import Update, flat
from tests.rank_runs import TEXTS, Case, make_policy, run
from tests.ranks import pool

SCHEDULES = ("native", "retain", "per_sample", "streaming")
BOUND = 5e-6
"""Relative L2, fp32."""
_SINGLE: dict[str, dict] = {}


def single(case):
    """The same run in this process."""
    alone = replace(case, strategy="single", ranks=1, options=_without_layout(case.options))
    if repr(alone) not in _SINGLE:
        _SINGLE[repr(alone)] = run(alone)
    return _SINGLE[repr(alone)]


def _without_layout(options):
    return {name: value for name, value in options.items() if name not in ("layout", "sync", "reduce_dtype")}


def many(case):
    results = pool(case.ranks).run(run, case, timeout=60)
    for result in results[1:]:
        assert torch.equal(result["weights"], results[0]["weights"])
        for mine, theirs in zip(result["gradients"], results[0]["gradients"], strict=True):
            assert torch.equal(mine, theirs)
    return results


def distance(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


def check(case, bound=BOUND):
    alone, results = single(case), many(case)
    assert alone["gradients"]
    for ours, theirs in zip(results[0]["gradients"], alone["gradients"], strict=True):
        assert distance(ours, theirs) < bound
    assert distance(results[0]["weights"], alone["weights"]) < bound
    pairs = sorted(pair for result in results for pair in result["scored"])
    assert pairs == sorted(alone["scored"])  # nothing twice, nothing lost
    return results


@pytest.mark.parametrize("layout", ["shared", "per_rank"])
@pytest.mark.parametrize("policy", ["lora", "full"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_ranks_give_the_gradient_of_one(schedule, strategy, policy, layout):
    check(Case(schedule=schedule, strategy=strategy, ranks=2, policy=policy, generations=3, options={"layout": layout}))


@pytest.mark.parametrize(
    ("schedule", "strategy", "prompts", "generations", "layout"),
    [
        ("native", "ddp", 1, 2, "shared"),  # fewer generations than ranks, idle ranks
        ("retain", "fsdp2", 1, 2, "shared"),
        ("per_sample", "fsdp2", 3, 2, "shared"),
        ("streaming", "ddp", 3, 3, "shared"),  # waves that hold two groups
        ("retain", "ddp", 3, 3, "shared"),
        ("native", "fsdp2", 3, 3, "shared"),
        ("streaming", "fsdp2", 1, 8, "shared"),
        ("per_sample", "ddp", 2, 8, "per_rank"),
        ("retain", "fsdp2", 3, 2, "per_rank"),  # ranks without a prompt
        ("retain", "hybrid", 2, 4, "shared"),
        ("streaming", "hybrid", 1, 3, "shared"),
    ],
)
def test_four_ranks_give_the_gradient_of_one(schedule, strategy, prompts, generations, layout):
    check(
        Case(
            schedule=schedule,
            strategy=strategy,
            ranks=4,
            policy="lora",
            prompts=prompts,
            generations=generations,
            options={"layout": layout},
        )  # fmt: skip
    )


NAN = float("nan")
UNEVEN = {
    "a group of equal rewards": ((0.3, 0.3, 0.3), (0.1, 0.9, 0.4)),
    "only one sample differs": ((0.3, 0.3, 0.3), (0.5, 0.5, 0.9)),
    "a dropped sample": ((0.2, NAN, 0.7), (0.1, 0.9, 0.4)),
    "a dropped group": ((NAN, NAN, NAN), (0.1, 0.9, 0.4)),
}


@pytest.mark.parametrize("rewards", UNEVEN.values(), ids=UNEVEN)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_work_that_is_missing_on_one_rank_only(schedule, strategy, rewards):
    check(Case(schedule=schedule, strategy=strategy, ranks=2, policy="shapes", generations=3, rewards=rewards))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_an_iteration_of_equal_rewards_moves_nothing(schedule, strategy):
    case = Case(schedule=schedule, strategy=strategy, ranks=2, policy="shapes", rewards=((0.5,) * 4,) * 2)
    before = torch.cat([p.detach().flatten() for p in make_policy(case).parameters() if p.requires_grad])
    for result in many(case):
        assert torch.equal(result["weights"], before)


@pytest.mark.parametrize(
    "options",
    [
        {"advantage": GroupAdvantage(std="global", clip=None)},
        {"advantage": GroupAdvantage(std="global", clip=1.0)},
        {"window": Fraction(0.5, draw_per="prompt"), "num_steps": 5},
        {"window": Fraction(0.5, draw_per="sample"), "num_steps": 5},
        {"beta": 0.2},
        {"beta": 0.2, "advantage": GroupAdvantage(std="global", clip=None)},
        {"micro_batch": 1, "groups_in_flight": 2},
        {"same_initial_noise": True, "verify_every": 1},
    ],
    ids=["global", "global_clip", "window_per_prompt", "window_per_sample", "kl", "kl_global", "micro", "same_noise"],
)
@pytest.mark.parametrize(
    ("schedule", "strategy"), [("native", "fsdp2"), ("retain", "fsdp2"), ("per_sample", "ddp"), ("per_sample", "fsdp2")]
)
def test_every_option_on_many_ranks(schedule, strategy, options):
    check(
        Case(
            schedule=schedule,
            strategy=strategy,
            ranks=2,
            policy="lora" if "beta" not in options else "full",
            prompts=3,
            generations=3,
            options=options,
        )
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_no_further_from_float64_than_twice_native(schedule, strategy):
    case = Case(schedule=schedule, strategy=strategy, ranks=2, policy="shapes", generations=3)
    update = Update(
        make_policy(case).double(), case.table, advantage=GroupAdvantage(clip=None), num_steps=3, dtype=torch.float64, texts=TEXTS,
    )  # fmt: skip
    exact = flat(update(Reweight("per_sample")))
    native = distance(single(replace(case, schedule="native"))["gradients"][0], exact)
    assert 0 < native < BOUND
    assert distance(many(case)[0]["gradients"][0], exact) <= 2 * native


def test_an_early_reduction_is_found_out():
    """Reweight's unit gradients reduced before they are corrected: what this suite exists to catch."""
    results = pool(2).run(
        run_with_early_reduction, Case(schedule="per_sample", strategy="ddp", ranks=2, policy="shapes")
    )
    alone = single(Case(schedule="per_sample", ranks=1, policy="shapes"))
    assert distance(results[0]["gradients"][0], alone["gradients"][0]) > 1e-2


def run_with_early_reduction(case):
    whole_rollout = Reweight.rollout

    def rollout(self, request):
        made = whole_rollout(self, request)
        made.unit_gradients[:] = [self.context.gradients.reduce(unit) for unit in made.unit_gradients]
        return made

    Reweight.rollout = rollout
    try:
        return run(case)
    finally:
        Reweight.rollout = whole_rollout


@pytest.mark.parametrize(
    ("schedule", "sync", "ranks", "prompts", "generations", "micro_batch", "reductions"),
    [
        ("retain", "per_update", 2, 3, 4, None, 1),
        ("streaming", "per_update", 2, 3, 4, None, 1),
        ("native", "per_group", 2, 3, 4, None, 3),  # B, since M >= R
        ("retain", "per_group", 2, 3, 4, 1, 3),
        ("per_sample", "per_group", 2, 3, 4, None, 3),
        ("streaming", "per_group", 4, 3, 2, None, 2),  # ceil(B / P), P = R / M = 2
        ("native", "per_step", 2, 2, 4, 1, 2 * 2 * 2),  # groups x rounds x |S|
        ("retain", "per_step", 2, 2, 4, None, 2 * 1 * 2),
    ],
)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_reductions_are_counted(schedule, sync, ranks, prompts, generations, micro_batch, reductions, strategy):
    case = Case(
        schedule=schedule, strategy=strategy, ranks=ranks, policy="shapes", prompts=prompts, generations=generations,
        options={"sync": sync, "micro_batch": micro_batch},
    )  # fmt: skip
    for result in check(case):
        counted, collectives, sent = result["traffic"]
        assert counted == reductions
        assert collectives >= counted
        assert sent >= counted * 4 * result["weights"].numel() * (1 if strategy == "ddp" else 1)


def test_the_same_five_iterations_on_one_two_and_four_ranks():
    case = Case(
        schedule="streaming", policy="shapes", prompts=2, generations=4, iterations=5, options={"max_grad_norm": 0.5}
    )
    alone = single(case)["metrics"]
    assert len(alone) == 5
    for strategy, ranks in (("ddp", 2), ("fsdp2", 4)):
        metrics = many(case.on(strategy, ranks))[0]["metrics"]
        for name in ("reward", "grad_norm", "grad_norm_clipped", "rows/forward", "rows/backward"):
            ours, theirs = ([m[name] for m in run_] for run_ in (metrics, alone))
            assert ours == pytest.approx(theirs, rel=1e-4), (name, ranks)


def test_a_reduction_in_bfloat16_is_as_exact_as_bfloat16():
    case = Case(schedule="retain", strategy="ddp", ranks=2, policy="shapes", options={"reduce_dtype": "bfloat16"})
    assert 1e-5 < distance(many(case)[0]["gradients"][0], single(case)["gradients"][0]) < 2**-7


def test_reweight_refuses_to_reduce_every_step():
    with pytest.raises(Exception, match="per_step would add up gradients that Reweight has not corrected"):
        pool(2).run(
            run, Case(schedule="streaming", strategy="ddp", ranks=2, policy="shapes", options={"sync": "per_step"})
        )

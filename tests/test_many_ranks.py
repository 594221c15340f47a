"""Any number of processes, any layout, any strategy: the same gradient, the same trajectories, the same weights.

A choice of the cases runs every time. All of them, prompts x generations x schedule x strategy x what is trained x layout x
ranks and every option of each, take a while longer: ``python -m pytest -m slow tests/test_many_ranks.py``.
"""

import itertools
from dataclasses import replace

import pytest
import torch
from lightning.pytorch import Callback

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


@pytest.mark.parametrize(
    ("schedule", "strategy", "policy"),
    [
        ("native", "ddp", "lora"),
        ("native", "fsdp2", "full"),
        ("retain", "ddp", "full"),
        ("retain", "fsdp2", "lora"),
        ("per_sample", "ddp", "lora"),
        ("per_sample", "fsdp2", "full"),
        ("streaming", "ddp", "full"),
        ("streaming", "fsdp2", "lora"),
    ],
)
def test_two_ranks_give_the_gradient_of_one(schedule, strategy, policy):
    check(Case(schedule=schedule, strategy=strategy, ranks=2, policy=policy, generations=3))


@pytest.mark.parametrize(
    ("schedule", "strategy", "policy"),
    [("retain", "ddp", "full"), ("streaming", "fsdp2", "lora")],
)
def test_two_ranks_with_prompts_of_their_own(schedule, strategy, policy):
    options = {"layout": "per_rank"}
    check(Case(schedule=schedule, strategy=strategy, ranks=2, policy=policy, generations=3, options=options))


@pytest.mark.parametrize(
    ("schedule", "strategy", "prompts", "generations", "layout"),
    [
        ("native", "ddp", 1, 2, "shared"),  # fewer generations than ranks, idle ranks
        ("per_sample", "fsdp2", 3, 2, "shared"),
        ("streaming", "ddp", 3, 3, "shared"),  # waves that hold two groups
        ("retain", "fsdp2", 3, 2, "per_rank"),  # ranks without a prompt
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


KINDS = list(UNEVEN)
MIXED = [
    *zip(SCHEDULES, ("ddp", "fsdp2", "ddp", "fsdp2"), KINDS, strict=True),
    ("native", "fsdp2", "a dropped sample"),
    ("streaming", "fsdp2", "a dropped sample"),
]
"""Each schedule, each kind of unevenness, and what ranks that keep step must call all the same."""


@pytest.mark.parametrize(("schedule", "strategy", "uneven"), MIXED)
def test_work_that_is_missing_on_one_rank_only(schedule, strategy, uneven):
    check(uneven_case(schedule, strategy, uneven))


def uneven_case(schedule, strategy, uneven):
    return Case(schedule=schedule, strategy=strategy, ranks=2, policy="shapes", generations=3, rewards=UNEVEN[uneven])


@pytest.mark.parametrize(
    ("schedule", "strategy"),
    [("retain", "ddp"), ("retain", "fsdp2"), ("streaming", "fsdp2")],
)
def test_an_iteration_of_equal_rewards_moves_nothing(schedule, strategy):
    case = Case(schedule=schedule, strategy=strategy, ranks=2, policy="shapes", rewards=((0.5,) * 4,) * 2)
    before = torch.cat([p.detach().flatten() for p in make_policy(case).parameters() if p.requires_grad])
    for result in many(case):
        assert torch.equal(result["weights"], before)


OPTIONS = {
    "global": {"advantage": GroupAdvantage(std="global", clip=None)},
    "global_clip": {"advantage": GroupAdvantage(std="global", clip=1.0)},
    "window_per_prompt": {"window": Fraction(0.5, draw_per="prompt"), "num_steps": 5},
    "window_per_sample": {"window": Fraction(0.5, draw_per="sample"), "num_steps": 5},
    "kl": {"beta": 0.2},
    "kl_global": {"beta": 0.2, "advantage": GroupAdvantage(std="global", clip=None)},
    "micro": {"micro_batch": 1, "groups_in_flight": 2},
    "same_noise": {"same_initial_noise": True, "verify_every": 1},
}


def option_case(schedule, strategy, option):
    return Case(
        schedule=schedule,
        strategy=strategy,
        ranks=2,
        policy="full" if "beta" in OPTIONS[option] else "lora",
        prompts=3,
        generations=3,
        options=OPTIONS[option],
    )


@pytest.mark.parametrize(
    ("schedule", "strategy", "option"),
    [
        ("native", "fsdp2", "global"),
        ("retain", "ddp", "global_clip"),
        ("per_sample", "fsdp2", "window_per_sample"),
        ("per_sample", "fsdp2", "kl_global"),
        ("streaming", "ddp", "kl"),
        ("streaming", "fsdp2", "micro"),
        ("retain", "fsdp2", "same_noise"),
    ],
)
def test_every_option_on_many_ranks(schedule, strategy, option):
    check(option_case(schedule, strategy, option))


ONE_BY_ONE = {"micro_batch": 1}
"""So that a group's sums go over several rounds."""


@pytest.mark.parametrize(
    ("strategy", "ranks", "policy", "prompts", "generations", "options"),
    [
        ("single", 1, "lora", 2, 4, {}),
        ("ddp", 2, "full", 2, 3, {}),  # rounds that complete a group and open the next
        ("fsdp2", 2, "lora", 3, 3, {"layout": "per_rank"}),  # several groups are open, one on each rank
        ("hybrid", 4, "full", 1, 8, {}),
        ("fsdp2", 2, "full", 2, 4, {"beta": 0.2, "advantage": GroupAdvantage(std="global", clip=None)}),
        ("fsdp2", 2, "full", 2, 4, {"beta": 0.2, "groups_in_flight": 2, "micro_batch": 3}),
    ],
)
def test_sums_held_as_shards(strategy, ranks, policy, prompts, generations, options):
    """The reference is Native's gradient: alone, the sums are another way too."""
    case = Case(
        schedule="sharded", strategy=strategy, ranks=ranks, policy=policy, prompts=prompts, generations=generations,
        options=ONE_BY_ONE | options,
    )  # fmt: skip
    native = single(replace(case, schedule="native"))
    for result in [run(case)] if ranks == 1 else check(case):
        assert distance(result["gradients"][0], native["gradients"][0]) < BOUND


@pytest.mark.parametrize("uneven", ["only one sample differs", "a dropped sample"])
def test_sums_held_as_shards_where_work_is_missing(uneven):
    check(replace(uneven_case("sharded", "fsdp2", uneven), options=ONE_BY_ONE))


@pytest.mark.parametrize(
    ("micro_batch", "reductions"),
    [(1, 2 * (2 * 3 + 1)), (None, 2 * 1)],  # groups x (2 per round, 1 in the last)
)
def test_sums_held_as_shards_are_reduced_every_round(micro_batch, reductions):
    case = Case(
        schedule="sharded",
        strategy="fsdp2",
        ranks=2,
        policy="shapes",
        generations=8,
        options={"micro_batch": micro_batch},
    )
    for result in check(case):
        assert result["traffic"][:2] == (reductions, reductions)


@pytest.mark.parametrize(
    ("schedule", "strategy"), [("native", "fsdp2"), ("retain", "ddp"), ("per_sample", "fsdp2"), ("streaming", "fsdp2")]
)
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


COUNTED = [
    ("streaming", "per_update", 2, 3, 4, None, 1),
    ("native", "per_group", 2, 3, 4, None, 3),  # B, since M >= R
    ("retain", "per_group", 2, 3, 4, 1, 3),
    ("streaming", "per_group", 4, 3, 2, None, 2),  # ceil(B / P), P = R / M = 2
    ("native", "per_step", 2, 2, 4, 1, 2 * 2 * 2),  # groups x rounds x |S|
    ("retain", "per_step", 2, 2, 4, None, 2 * 1 * 2),
]


@pytest.mark.parametrize(
    ("strategy", "schedule", "sync", "ranks", "prompts", "generations", "micro_batch", "reductions"),
    [*(("ddp", *row) for row in COUNTED), *(("fsdp2", *row) for row in COUNTED[::2])],
)
def test_reductions_are_counted(strategy, schedule, sync, ranks, prompts, generations, micro_batch, reductions):
    case = Case(
        schedule=schedule, strategy=strategy, ranks=ranks, policy="shapes", prompts=prompts, generations=generations,
        options={"sync": sync, "micro_batch": micro_batch},
    )  # fmt: skip
    for result in check(case):
        counted, collectives, sent = result["traffic"]
        assert counted == collectives == reductions  # all of them fit into one bucket
        whole = 4 * result["weights"].numel()
        assert 0.9 * whole < sent / counted <= (whole if strategy == "ddp" else 1.1 * whole)  # shards are padded


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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_reduction_in_bfloat16_is_as_exact_as_bfloat16(strategy):
    check_reduction_in_bfloat16(Case(schedule="retain", strategy=strategy, ranks=2, policy="shapes"))


def check_reduction_in_bfloat16(case):
    """Rounded terms and a rounded sum, 2^-8 each at most, many of them and of either sign; yet more than fp32 would leave."""
    case = replace(case, options={"reduce_dtype": "bfloat16"})
    assert 1e-5 < distance(many(case)[0]["gradients"][0], single(case)["gradients"][0]) < 2**-7


PRECISIONS = [
    ("fsdp2", "lora", "bf16-true"),  # fp32 adapters on bf16 weights
    ("fsdp2_bf16", "full", "bf16-mixed"),  # fp32 shards, gathered in bf16
]


@pytest.mark.parametrize(("strategy", "policy", "precision"), PRECISIONS)
def test_a_lower_precision_is_as_exact_as_it_can_be(strategy, policy, precision):
    """Micro-batches of other sizes round otherwise: a few units in the last place of bf16, 2^-8."""
    case = Case(strategy=strategy, ranks=2, policy=policy, generations=3, trainer={"precision": precision})
    assert distance(many(case)[0]["gradients"][0], single(case)["gradients"][0]) < 2**-6


@pytest.mark.parametrize(
    ("family", "policy", "ranks"),
    [("flux", "lora", 2), ("wan21", "full", 2)],
)
def test_other_families(family, policy, ranks):
    check(family_case("fsdp2", family, policy, ranks))


def family_case(strategy, family, policy, ranks, schedule="retain"):
    options = {"frames": 5} if family.startswith("wan") else {}
    return Case(
        schedule=schedule, strategy=strategy, ranks=ranks, family=family, policy=policy, generations=3, policy_options=options
    )  # fmt: skip


def draw_first(case):
    """Train after images were drawn in inference mode, as a validation does on CUDA."""

    class DrawFirst(Callback):
        def on_train_start(self, trainer, pl_module):
            with torch.inference_mode():
                pl_module.sample(TEXTS[:1], prompt_index=torch.zeros(1).long(), image_index=torch.zeros(1).long())

    return run(case, DrawFirst())


def test_training_goes_on_after_a_validation_in_inference_mode():
    case = Case(strategy="fsdp2", ranks=2, policy="shapes")
    for result in pool(2).run(draw_first, case):
        assert distance(result["gradients"][0], single(case)["gradients"][0]) < BOUND


def with_a_seed_of_its_own(case):
    """A run that goes on after iteration 7, with the rank as its seed -> the error."""

    class Differ(Callback):
        def on_train_start(self, trainer, pl_module):
            pl_module.iteration, pl_module.seed = 7, trainer.global_rank

    try:
        run(case, Differ())
    except ValueError as error:
        return str(error)


def test_ranks_are_compared_at_the_start_whatever_the_iteration():
    for message in pool(2).run(with_a_seed_of_its_own, Case(strategy="ddp", ranks=2, policy="shapes")):
        assert message.startswith("seed is not the same on all ranks: (0, 0) on rank 0, (1, 0) on rank(s) [1]")


def test_reweight_refuses_to_reduce_every_step():
    with pytest.raises(Exception, match="per_step would add up gradients that Reweight has not corrected"):
        pool(2).run(
            run, Case(schedule="streaming", strategy="ddp", ranks=2, policy="shapes", options={"sync": "per_step"})
        )


# everything: minutes

BOTH = ("ddp", "fsdp2")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["shared", "per_rank"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("policy", ["lora", "full"])
@pytest.mark.parametrize("strategy", [*BOTH, "hybrid"])
def test_any_sums_held_as_shards(strategy, policy, ranks, layout):
    for prompts, generations, micro_batch in itertools.product((1, 2, 3), (2, 3, 4, 8), (1, 2)):
        check(
            Case(
                schedule="sharded",
                strategy=strategy,
                ranks=ranks,
                policy=policy,
                prompts=prompts,
                generations=generations,
                options={"layout": layout, "micro_batch": micro_batch},
            )
        )


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", ["shared", "per_rank"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("policy", ["lora", "full"])
@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_number_of_prompts_and_generations(schedule, strategy, policy, ranks, layout):
    for prompts, generations in itertools.product((1, 2, 3), (2, 3, 4, 8)):
        check(
            Case(
                schedule=schedule,
                strategy=strategy,
                ranks=ranks,
                policy=policy,
                prompts=prompts,
                generations=generations,
                options={"layout": layout},
            )
        )


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lora", "full"])
@pytest.mark.parametrize("strategy", ["fsdp2", "hybrid"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_sharded_with_activation_checkpointing(schedule, strategy, policy):
    for generations, options in ((3, {}), (8, {}), (3, {"layout": "per_rank"})):
        case = Case(
            schedule=schedule, strategy=strategy, ranks=4, policy=policy, generations=generations,
            options=options, policy_options={"activation_checkpointing": True},
        )  # fmt: skip
        check(case)


@pytest.mark.slow
@pytest.mark.parametrize("uneven", UNEVEN)
@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_work_that_is_missing(schedule, strategy, uneven):
    for ranks, layout in itertools.product((2, 4), ("shared", "per_rank")):
        check(replace(uneven_case(schedule, strategy, uneven), ranks=ranks, options={"layout": layout}))


AFFINE = [
    (schedule, option)
    for schedule in SCHEDULES
    for option in OPTIONS
    if (schedule, option) != ("streaming", "global_clip")
]
"""What a schedule does not refuse."""


@pytest.mark.slow
@pytest.mark.parametrize("strategy", BOTH)
@pytest.mark.parametrize(("schedule", "option"), AFFINE)
def test_any_option(schedule, strategy, option):
    for ranks in (2, 4):
        check(replace(option_case(schedule, strategy, option), ranks=ranks))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hybrid"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_reduction_in_bfloat16(schedule, strategy):
    for policy in ("lora", "full"):
        check_reduction_in_bfloat16(Case(schedule=schedule, strategy=strategy, ranks=4, policy=policy))


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["lora", "full"])
@pytest.mark.parametrize("family", ["flux", "wan21", "wan22"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_family(schedule, family, policy):
    for strategy, ranks in (("ddp", 2), ("fsdp2", 2), ("fsdp2", 4), ("hybrid", 4)):
        check(family_case(strategy, family, policy, ranks, schedule))


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["per_group", "per_update"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "hybrid"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_any_synchronisation(schedule, strategy, sync):
    for prompts, generations in ((3, 4), (3, 3), (3, 2)):
        check(
            Case(
                schedule=schedule,
                strategy=strategy,
                ranks=4,
                policy="lora",
                prompts=prompts,
                generations=generations,
                options={"sync": sync},
            )
        )

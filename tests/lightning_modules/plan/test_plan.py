"""The plan against a real iteration of the tiny families: what is predicted within 10 % of what is there."""

import copy
import functools
import tempfile

import pytest
import torch
from lightning.pytorch import Callback

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.windows import AllButLast, FixedWindow, Fraction, RandomWindow
from lightning_modules.plan.plan import levels_held, optimizer_bytes, readable
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.types import Rows
from tests.harness import Update
from tests.loop import fit, module
from tests.rank_runs import STRATEGIES, Case, GivenRewards, make_module
from tests.ranks import pool
from tests.tiny import TinyPolicy
from tests.tiny_models import FAMILIES, PROMPTS, policy

AdamW = functools.partial(torch.optim.AdamW, lr=1e-3)


def storages(tensors):
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def run(model, window, schedule, **options):
    """(update, its rollouts before their backward)."""
    rewards = torch.arange(2.0 * 3).reshape(2, 3)
    update = Update(model, rewards, window=window, num_steps=4, texts=PROMPTS, **options)
    schedule.bind(update.context())
    return update, [schedule.rollout(request) for request in update.requests([0, 1])]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_predicted_bytes_are_the_bytes_of_an_iteration(family, trainable):
    model = policy(family, trainable=trainable)
    plain = policy(family, trainable="full")
    plan = module(Retain(), policy=model, generations_per_prompt=3, window=FixedWindow(0, 2)).plan(PROMPTS[:2])
    update, rollouts = run(model, FixedWindow(0, 2), Retain())
    optimizer = AdamW(update.parameters)
    update(Retain())
    optimizer.step()
    requests = [rollout.request for rollout in rollouts]
    latents = [t for r in rollouts for t in (r.latents, *(x for s in r.steps for x in (s.latents, s.next_latents)))]
    held = {
        "weight_bytes": storages([*plain.parameters(), *plain.buffers()]),
        "adapter_bytes": storages(update.parameters) if trainable == "lora" else 0,
        "optimizer_bytes": storages(t for state in optimizer.state.values() for t in state.values()),
        "gradient_bytes": storages(p.grad for p in update.parameters),
        "latent_bytes": storages([*latents, *(r.initial for r in requests)]),
        "conditioning_bytes": storages(t for r in requests for t in r.conditioning.tensors.values()),
        "frozen_bytes": storages(
            t
            for part in (*model.text.modules.values(), model.frozen.vae)
            for t in (*part.parameters(), *part.buffers())
        ),
    }
    assert {name: getattr(plan, name) for name in held} == pytest.approx(held, rel=0.1)
    assert plan.trainable == sum(p.numel() for p in update.parameters)
    assert plan.trainable_tensors == len(update.parameters)
    assert plan.activation_bytes == pytest.approx(plan.activation_bytes_per_step * plan.retained_row_steps, rel=0.01)
    assert plan.retained_row_steps == 3 * 2  # one group of three, two trained steps
    assert plan.total_bytes == pytest.approx(
        sum(v for k, v in held.items() if k != "frozen_bytes") + plan.activation_bytes, rel=0.1
    )


@pytest.mark.parametrize(("schedule", "rows", "graphs"), [(Native, 6 * 7, 3), (Retain, 6 * 4, 9), (Reweight, 6 * 4, 1)])
def test_forwards_and_graphs_are_those_of_the_schedule(schedule, rows, graphs):
    plan = module(schedule(), generations_per_prompt=3, beta=0.1).plan(PROMPTS[:2])
    assert (plan.forward_rows, plan.retained_row_steps, plan.reference_rows) == (rows, graphs, 6 * 3)
    assert (plan.samples, plan.samples_per_rank, plan.idle_slots) == (6, 6, 0)
    assert plan.reference_bytes == plan.weight_bytes == 4 * plan.parameters  # TinyPolicy has no adapters to switch off


@pytest.mark.parametrize(("schedule", "graphs"), [(Native, 1), (Retain, 2 * 3), (Reweight, 1)])
def test_of_several_ranks_memory_is_that_of_one(schedule, graphs):
    """2 prompts x 3 on 4 ranks are 2 waves with 2 idle slots; the first wave holds a member of the second prompt, whose
    graphs wait for the second wave."""
    alone, plan = (
        module(schedule(), generations_per_prompt=3, beta=0.1).plan(PROMPTS[:2], ranks=ranks) for ranks in (1, 4)
    )
    assert (plan.forward_rows, plan.reference_rows) == (alone.forward_rows, alone.reference_rows)  # all ranks together
    assert (plan.samples, plan.samples_per_rank, plan.idle_slots) == (6, 2, 2)
    assert (plan.retained_row_steps, plan.weight_bytes) == (graphs, alone.weight_bytes)
    assert plan.latent_bytes * 3 == alone.latent_bytes
    assert "4, layout shared, 2 of 8 slots idle; weights whole on each; memory is that of one rank" in str(plan)


def test_baseline_layout_gives_whole_groups_to_a_rank():
    plan = module(Retain(), generations_per_prompt=3, layout="per_rank").plan(PROMPTS[:2], ranks=2)
    assert (plan.samples_per_rank, plan.idle_slots, plan.retained_row_steps) == (3, 0, 3 * 3)
    assert "2, layout per_rank, no slot idle" in str(plan)


def test_sharded_weights_are_divided_and_local_gradients_are_not(tmp_path):
    alone = make_module(Case(policy="full")).plan(PROMPTS[:2], ranks=2)
    plan = pool(2).run(planned_sharded, Case(policy="full", strategy="fsdp2", ranks=2))[0]
    for name in ("weight_bytes", "optimizer_bytes"):
        assert getattr(plan, name) == pytest.approx(getattr(alone, name) / 2, rel=1e-3)
    assert plan.gradient_bytes == pytest.approx(1.5 * alone.gradient_bytes, rel=1e-3)  # with the reduced shard
    assert 0 < plan.gathered_bytes <= alone.weight_bytes
    assert (plan.activation_bytes, plan.parameters, plan.trainable) == (
        alone.activation_bytes, alone.parameters, alone.trainable,
    )  # fmt: skip
    assert "weights sharded over 2" in str(plan)


def planned_sharded(case):
    class Plans(Callback):
        def on_fit_start(self, trainer, pl_module):
            self.plan = pl_module.plan(PROMPTS[:2], ranks=2) if trainer.is_global_zero else None

    with tempfile.TemporaryDirectory() as root:
        fit(
            make_module(case), 1, root=root, scorer=GivenRewards(case.table), callbacks=[plans := Plans()],
            strategy=STRATEGIES[case.strategy](), devices=2, use_distributed_sampler=False,
        )  # fmt: skip
    return plans.plan


@pytest.mark.parametrize("family", FAMILIES)
def test_encoders_and_vae_have_a_line_each(family):
    mine = policy(family)
    plan = module(policy=mine).plan(PROMPTS[:1])
    encoders = storages(t for part in mine.text.modules.values() for t in (*part.parameters(), *part.buffers()))
    assert plan.encoder_bytes == pytest.approx(encoders, rel=0.1)
    assert plan.vae_bytes == storages([*mine.frozen.vae.parameters(), *mine.frozen.vae.buffers()])
    lines = [line.split("  ")[0] for line in str(plan).splitlines()]
    assert lines[-2:] == ["text encoders", "VAE"]
    assert plan.as_dict()["frozen_bytes"] == plan.frozen_bytes == plan.encoder_bytes + plan.vae_bytes


@pytest.mark.parametrize("lacking", ["text", "vae"])
def test_what_is_not_there_has_no_line(lacking):
    mine = policy("sd3")
    del mine.frozen._modules_by_name["vae" if lacking == "vae" else "text_encoder"]
    if lacking == "text":
        del mine.frozen._modules_by_name["text_encoder_2"], mine.frozen._modules_by_name["text_encoder_3"]
    plan = module(policy=mine).plan(PROMPTS[:1])
    assert (plan.encoder_bytes > 0, plan.vae_bytes > 0) == (lacking == "vae", lacking == "text")
    assert ("text encoders" in str(plan), "VAE " in str(plan)) == (lacking == "vae", lacking == "text")


def test_guidance_doubles_the_backbones_rows():
    guided = ClassifierFreeGuidance(policy("sd3"), 4.5)
    plan = module(policy=guided, beta=0.1).plan(PROMPTS[:2])
    assert plan.backbone_rows == 2 and plan.policy == "SD3Policy"
    assert plan.reference_bytes == 0  # its adapters are switched off instead
    assert "2 backbone rows each" in str(plan)


@pytest.mark.parametrize("window", [AllButLast(), FixedWindow(1, 2), FixedWindow(2, 2), RandomWindow(1)])
def test_latents_held_where_all_rows_train_the_same_steps(window):
    _, rollouts = run(TinyPolicy(), window, Native())
    rollout = rollouts[0]
    ends = [x for step in rollout.steps for x in (step.latents, step.next_latents)]
    levels = storages([rollout.request.initial, rollout.latents, *ends]) / storages([rollout.request.initial])
    assert levels_held(rollout.request.trained) == levels


def test_latents_held_where_rows_differ():
    rows = Rows(prompt=torch.zeros(8, dtype=torch.int64), generation=torch.arange(8))
    trained = Fraction(0.7, draw_per="sample").trained(8, seed=0, iteration=0, rows=rows)
    assert bool((trained != trained[0]).any())
    assert levels_held(trained) == 2 + 2 * 4


def test_optimizer_states_by_hand():
    parameters = [torch.nn.Parameter(torch.zeros(3, 5)), torch.nn.Parameter(torch.zeros(7, dtype=torch.bfloat16))]
    elements = 4 * 15 + 2 * 7
    assert optimizer_bytes(AdamW, parameters) == 2 * elements + 2 * 4  # two moments, and a step counter per tensor
    assert optimizer_bytes(functools.partial(torch.optim.SGD, lr=1.0), parameters) == 0
    assert optimizer_bytes(functools.partial(torch.optim.SGD, lr=1.0, momentum=0.9), parameters) == elements
    assert all(p.grad is None for p in parameters)


def test_an_optimizer_that_needs_data_is_unknown():
    class Peeking(torch.optim.SGD):
        def step(self, closure=None):
            return self.param_groups[0]["params"][0].sum().item()

    assert optimizer_bytes(functools.partial(Peeking, lr=1.0), [torch.nn.Parameter(torch.zeros(2))]) is None
    plan = module(optimizer=Peeking).plan(PROMPTS[:1])
    assert plan.optimizer_bytes is None and "optimizer           unknown" in str(plan)


def test_what_a_person_reads():
    model = module(Retain(), generations_per_prompt=3, advantage=GroupAdvantage())
    before = copy.deepcopy(model.policy.state_dict())
    plan = model.plan(PROMPTS[:2])
    text = str(plan)
    for line in (
        "plan             TinyPolicy under Retain",
        "parameters       848",
        "trainable        848 in 4 tensors (100.000%)",
        "samples          6 per iteration",
        "steps            4, trained 3",
        "sigmas           1.0000 0.9000 0.7500 0.5000 0.0000",
        "policy forwards  24 rows per iteration",
        "optimizer          6.64 KiB",
    ):
        assert line in text.splitlines(), line
    assert "adapters" not in text and "KL reference" not in text
    assert plan.as_dict()["total_bytes"] == plan.total_bytes
    assert all(torch.equal(before[name], t) for name, t in model.policy.state_dict().items())


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "0.977 KiB"),
        (2**20, "1 MiB"),
        (717_225_984, "684 MiB"),
        (3 * 2**40, "3 TiB"),
        (None, "unknown"),
    ],
)
def test_bytes_for_a_person(size, text):
    assert readable(size) == text

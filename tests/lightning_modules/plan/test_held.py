"""Counts of what schedules run and hold, against the schedules themselves."""

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.parallel.gradients import Gradient, LocalGradients
from lightning_modules.plan.held import Work, held
from lightning_modules.schedules.base import Schedule
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.schedules.reweight_sharded import ReweightSharded
from tests.harness import Update
from tests.lightning_modules.several_rewards import SeveralRewards, table
from tests.loop import fit, module
from tests.tiny import TinyPolicy

STEPS, TRAINED = 4, 3
WIDE = 4 * sum(p.numel() for p in TinyPolicy().parameters())
GLOBAL = GroupAdvantage(std="global", clip=None)
HELD_BACK = GroupAdvantage(std="global", clip=1.0)


class LargestGradients:
    """The most bytes of gradients alive at once: tensors of every ``Gradient``, and the parameters' ``.grad``."""

    def __init__(self, monkeypatch, parameters):
        self.bytes, self._parameters, self._alive = 0, parameters, weakref.WeakSet()
        for kind, names in ((Gradient, ("__init__", "add_", "clear")), (LocalGradients, ("deliver",))):
            for name in names:
                monkeypatch.setattr(kind, name, self._watched(getattr(kind, name)))

    def _watched(self, method):
        def watched(this, *arguments, **options):
            if isinstance(this, Gradient):
                self._alive.add(this)
            self._look()  # before anything is dropped
            result = method(this, *arguments, **options)
            self._look()
            return result

        return watched

    def _look(self):
        tensors = [t for gradient in self._alive for t in getattr(gradient, "tensors", []) if t is not None]
        tensors += [p.grad for p in self._parameters if p.grad is not None]
        self.bytes = max(self.bytes, sum({t.data_ptr(): t.nbytes for t in tensors}.values()))


def update(schedule, *, prompts=3, generations=4, beta=0.0, advantage=None, dtype=torch.float32, **options):
    policy = TinyPolicy(seed=1).to(dtype)
    rewards = torch.arange(1.0, prompts * generations + 1).reshape(prompts, generations) ** 1.5
    advantage = advantage or GroupAdvantage()
    reference = TinyPolicy(seed=2).to(dtype) if beta else None
    made = Update(policy, rewards, num_steps=STEPS, beta=beta, advantage=advantage, reference=reference, **options)
    work = Work(
        prompts=prompts, generations=generations, groups_in_flight=options.get("groups_in_flight", 1),
        micro_batch=options.get("micro_batch"), num_steps=STEPS, trained_steps=TRAINED, advantage=advantage, beta=beta,
        narrow=WIDE * dtype.itemsize // 4, wide=WIDE,
    )  # fmt: skip
    return made, held(schedule, work)


CASES = {
    "native": (Native, {}),
    "native-kl-global": (Native, {"beta": 0.1, "advantage": GLOBAL}),
    "native-bf16": (Native, {"dtype": torch.bfloat16}),
    "retain": (Retain, {"micro_batch": 2}),
    "retain-kl-global": (Retain, {"beta": 0.1, "advantage": GLOBAL}),
    "streaming": (Reweight, {}),
    "streaming-micro-1": (Reweight, {"micro_batch": 1}),
    "streaming-micro-3": (Reweight, {"micro_batch": 3, "groups_in_flight": 2}),
    "streaming-one-chunk": (Reweight, {"micro_batch": 2, "groups_in_flight": 3}),
    "streaming-kl": (Reweight, {"beta": 0.1, "micro_batch": 2}),
    "streaming-bf16": (Reweight, {"dtype": torch.bfloat16, "micro_batch": 1}),
    "streaming-global": (Reweight, {"advantage": GLOBAL}),
    "per-sample": (lambda: Reweight("per_sample"), {}),
    "per-sample-bf16": (lambda: Reweight("per_sample"), {"dtype": torch.bfloat16, "groups_in_flight": 2}),
    "per-sample-held-back": (Reweight, {"advantage": HELD_BACK, "micro_batch": 2}),
    "per-sample-kl": (lambda: Reweight("per_sample"), {"beta": 0.1}),
}


@pytest.mark.parametrize("case", CASES)
def test_gradient_bytes_are_the_largest_alive(case, monkeypatch):
    make, options = CASES[case]
    schedule = make()
    run, expected = update(schedule, **options)
    largest = LargestGradients(monkeypatch, run.parameters)
    run(schedule)
    assert largest.bytes == pytest.approx(expected.gradient_bytes, rel=0.1)


@pytest.mark.parametrize(
    "advantage", [GroupAdvantage(clip=None, combine="advantage", std=std) for std in ("group", "global")]
)
@pytest.mark.parametrize("micro_batch", [1, 3])
def test_streaming_holds_a_sum_for_each_reward(micro_batch, advantage, monkeypatch):
    """With the global std a factor per reward is known at the end only, and every group stays open."""
    values, applies = table("whole")
    run = SeveralRewards(
        TinyPolicy(seed=1), values, applies, advantage=advantage, num_steps=STEPS, micro_batch=micro_batch
    )
    work = Work(
        prompts=3, generations=4, groups_in_flight=1, micro_batch=micro_batch, num_steps=STEPS, trained_steps=TRAINED,
        advantage=advantage, reward_weights=run.weights, beta=0.0, narrow=WIDE, wide=WIDE,
    )  # fmt: skip
    largest = LargestGradients(monkeypatch, run.parameters)
    schedule = Reweight("streaming")
    expected = held(schedule, work).gradient_bytes
    run(schedule)
    assert largest.bytes == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("make", [Native, Retain, Reweight])
def test_rows_are_those_the_schedule_counts(make):
    schedule = make()
    run, expected = update(schedule, beta=0.1)
    calls = []
    run.reference.register_forward_hook(lambda module, arguments, result: calls.append(len(arguments[0])))
    run(schedule)
    assert schedule.forward_rows == expected.forward_rows == 12 * (STEPS + (TRAINED if make is Native else 0))
    assert sum(calls) == expected.scored_rows == 12 * TRAINED


@pytest.mark.parametrize(
    ("advantage", "micro_batch", "chunk"), [(GroupAdvantage(), None, 4), (GroupAdvantage(), 3, 4), (HELD_BACK, 2, 12)]
)
def test_retain_holds_the_graphs_of_a_chunk_or_of_the_iteration(advantage, micro_batch, chunk):
    schedule = Retain()
    run, expected = update(schedule, advantage=advantage, micro_batch=micro_batch)
    schedule.bind(run.context())
    prompts = list(range(chunk // 4))
    rollouts = [schedule.rollout(request) for request in run.requests(prompts)]
    graphs = [step.log_prob for rollout in rollouts for step in rollout.steps]
    assert all(graph.grad_fn is not None for graph in graphs)
    assert expected.row_steps == sum(map(len, graphs)) == chunk * TRAINED
    assert expected.graph_rows == max(map(len, graphs))


def test_native_and_reweight_hold_one_graph():
    _, native = update(Native(micro_batch=2))
    _, reweight = update(Reweight(), micro_batch=3)
    assert (native.graph_rows, native.row_steps) == (2, 2)
    assert (reweight.graph_rows, reweight.row_steps) == (1, 1)


def test_native_runs_every_sample_again_in_every_update():
    _, parts = update(Native(updates_per_rollout=2))
    _, everything = update(Native(updates_per_rollout=2, samples_per_update="all"))
    assert parts.forward_rows == 12 * (STEPS + TRAINED)
    assert everything.forward_rows == 12 * (STEPS + 2 * TRAINED)


def test_streaming_does_not_grow_with_the_generations():
    few, many = (update(Reweight(), generations=m, micro_batch=1)[1].gradient_bytes for m in (4, 20))
    assert few == many
    _, apart = update(Reweight("per_sample"), generations=20, micro_batch=1)
    assert apart.gradient_bytes == 21 * WIDE


@pytest.mark.parametrize(("micro_batch", "sums"), [(1, 2), (3, 2), (8, 0)])
def test_sums_held_as_shards_are_shared_out(micro_batch, sums, monkeypatch, tmp_path):
    policy, advantage = TinyPolicy(seed=1), GroupAdvantage(clip=None)
    work = Work(
        prompts=2, generations=8, groups_in_flight=1, micro_batch=micro_batch, num_steps=STEPS, trained_steps=TRAINED,
        advantage=advantage, beta=0.0, narrow=WIDE, wide=WIDE,
    )  # fmt: skip
    expected = held(ReweightSharded(), work).gradient_bytes
    assert expected - held(ReweightSharded(), replace(work, shards=4)).gradient_bytes == (1 + sums) * WIDE * 3 // 4
    largest = LargestGradients(monkeypatch, list(policy.parameters()))
    model = module(
        ReweightSharded(), policy=policy, advantage=advantage, num_steps=STEPS, generations_per_prompt=8,
        micro_batch=micro_batch,
    )  # fmt: skip
    fit(model, 1, root=tmp_path, prompts=["a red circle", "a blue ring"])
    assert largest.bytes == pytest.approx(expected, rel=0.1)


def test_an_unknown_schedule_is_named():
    class Other(Schedule):
        rollout = backward = None

    with pytest.raises(ValueError, match="Other holds: register it"):
        update(Other())
    gc.collect()  # nothing keeps the class

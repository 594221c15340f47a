"""The loop itself: equal curves under every schedule, honest counters, no leaks, no drift, clear refusals."""

import copy
import functools
import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.transitions import CPS, ODE
from lightning_modules.flow.windows import AllButLast, FixedWindow, Fraction
from lightning_modules.objectives.step_weights import InverseSensitivity
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from tests.harness import Update
from tests.loop import PROMPTS, Scorer, fit, module, smooth_reward
from tests.tiny import TinyPolicy

SCHEDULES = {
    "native": lambda: Native(),
    "retain": lambda: Retain(),
    "per_sample": lambda: Reweight("per_sample"),
    "streaming": lambda: Reweight("streaming"),
}


@pytest.mark.parametrize("options", [{}, {"beta": 0.5, "step_weights": InverseSensitivity(), "groups_in_flight": 2}])
def test_ten_iterations_are_the_same_under_every_schedule(options, tmp_path):
    curves = {}
    for name, schedule in SCHEDULES.items():
        metrics = fit(module(schedule(), optimizer=torch.optim.SGD, lr=5.0, **options), 10, root=tmp_path)
        curves[name] = torch.tensor([[m["reward"], m["grad_norm"]] for m in metrics], dtype=torch.float64)
    assert curves["native"][-1, 0] != curves["native"][0, 0]  # it learns something
    assert torch.equal(curves["retain"], curves["native"])
    for name in ("per_sample", "streaming"):
        torch.testing.assert_close(curves[name], curves["native"], rtol=2e-4, atol=1e-7)


def test_the_reward_rises(tmp_path):
    metrics = fit(module(lr=3e-2), 40, root=tmp_path)
    start, end = metrics[0]["reward"], sum(m["reward"] for m in metrics[-5:]) / 5
    assert end > start + 0.5 * abs(start)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_learning_rate_zero_changes_nothing(name, precision, tmp_path):
    model = module(SCHEDULES[name](), lr=0.0, micro_batch=2)
    before = copy.deepcopy(model.policy).to(torch.bfloat16 if precision == "bf16-true" else torch.float32).state_dict()
    metrics = fit(model, 2, root=tmp_path, precision=precision)
    assert all(torch.equal(before[k], v) for k, v in model.policy.state_dict().items())
    assert metrics[0]["grad_norm"] > 0
    if name == "native":  # the update's micro-batches are the rollout's: the ratio is exactly 1
        deviations = [v for m in metrics for k, v in m.items() if k.startswith("ratio_deviation/")]
        assert len(deviations) == 2 * 3
        assert set(deviations) == {0.0}
        assert metrics[-1]["clipped_share"] == 0.0


def test_mixed_precision_reaches_every_weight_after_steps_without_gradient(tmp_path):
    """Autocast caches casts of the weights: those made for the free steps must not cut the trained step's graph."""
    norms = {}
    for name, schedule in SCHEDULES.items():
        model = module(schedule(), window=FixedWindow(2, 1), optimizer=torch.optim.SGD)
        before = copy.deepcopy(model.policy.state_dict())
        norms[name] = fit(model, 1, root=tmp_path, precision="bf16-mixed")[0]["grad_norm"]
        assert not any(torch.equal(before[k], v) for k, v in model.policy.state_dict().items())
    torch.testing.assert_close(torch.tensor(list(norms.values())), torch.full((4,), norms["native"]), rtol=0.05, atol=0)


def test_verification_is_quiet_on_policy_and_loud_about_a_shifted_grid(tmp_path):
    class OffByOne(Retain):
        def rollout(self, request):
            rollout = super().rollout(request)
            rollout.steps[:] = [copy.copy(s) for s in rollout.steps]
            for s in rollout.steps:
                object.__setattr__(s, "step", (s.step + 1) % 4)
            return rollout

        def backward(self, rollouts, advantages):
            """Only the verification is of interest."""

    for schedule in (Retain(), Reweight()):
        metrics = fit(module(schedule, verify_every=2), 4, root=tmp_path)
        assert [("verify/ratio_deviation" in m) for m in metrics][0]
        assert metrics[-1]["verify/ratio_deviation"] < 1e-5
    shifted = fit(module(OffByOne(), verify_every=1), 1, root=tmp_path)
    assert shifted[0]["verify/ratio_deviation"] > 1e-3


@pytest.mark.parametrize(("updates", "share"), [(2, "part"), (3, "all")])
def test_native_takes_several_updates_with_the_true_ratio(updates, share, tmp_path):
    steps = []

    class Steps(Callback):
        def on_before_optimizer_step(self, trainer, pl_module, optimizer):
            steps.append(pl_module.iteration)

    schedule = Native(updates_per_rollout=updates, samples_per_update=share)
    model = module(schedule, lr=0.05, optimizer=torch.optim.SGD)
    metrics = fit(model, 2, root=tmp_path, callbacks=[Steps()])
    assert steps == [0] * updates + [1] * updates
    assert model.iteration == 2
    assert model.trainer.global_step == 2 * updates
    deviations = [v for k, v in metrics[-1].items() if k.startswith("ratio_deviation/")]
    assert max(deviations) > 0  # the policy moved between the updates


def test_several_updates_equal_a_hand_made_loop(tmp_path):
    """Two updates on halves = two one-group gradients, the second at the moved policy with clipped true ratio."""
    model = module(
        Native(updates_per_rollout=2), lr=1.0, optimizer=torch.optim.SGD, clip_range=10.0, max_grad_norm=None
    )
    policy = copy.deepcopy(model.policy)
    fit(model, 1, root=tmp_path)

    schedule = Native()
    update = Update(policy, torch.zeros(2, 4), advantage=GroupAdvantage(clip=None), clip_range=10.0, texts=PROMPTS)
    schedule.bind(update.context())
    rollouts = [schedule.rollout(request) for k in range(2) for request in update.requests([k])]
    rewards = [smooth_reward(policy.decode(rollout.latents)) for rollout in rollouts]
    for k, rollout in enumerate(rollouts):
        schedule.begin(4 * 3)
        schedule.backward([rollout], GroupAdvantage(clip=None)(rewards[k], torch.full((4,), k), torch.arange(4)))
        schedule.finish()
        with torch.no_grad():
            for p in policy.parameters():
                p -= p.grad
    for ours, theirs in zip(model.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


class SavedTensors:
    """Counts live tensors that autograd graphs hold, and all live tensors."""

    def __init__(self):
        self.saved = weakref.WeakSet()

    def hooks(self):
        class Box:
            def __init__(self, tensor):
                self.tensor = tensor

        def pack(tensor):
            box = Box(tensor.detach())
            self.saved.add(box)
            return box

        return torch.autograd.graph.saved_tensors_hooks(pack, lambda box: box.tensor)

    def count(self):
        gc.collect()
        return len(self.saved), sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


@pytest.mark.parametrize("name", SCHEDULES)
def test_nothing_stays_alive_after_an_iteration(name, tmp_path):
    live, peak = SavedTensors(), []

    class Counter(Callback):
        counts = []

        def on_rollout_end(self, trainer, pl_module, samples, scores):
            peak.append(len(live.saved))

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.counts.append(live.count())

    Counter.counts.clear()
    with live.hooks():
        fit(module(SCHEDULES[name](), lr=1e-3), 4, root=tmp_path, callbacks=[Counter()])
    assert len(set(Counter.counts[1:])) == 1  # the optimizer's moments appear after the first
    assert Counter.counts[-1][0] == 0
    assert (max(peak) > 0) == (name == "retain")  # the others hold no graph when rewards are asked for


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_failing_reward_leaves_nothing_alive(name, tmp_path):
    live = SavedTensors()

    def fail_in_the_third(images, calls=[]):  # noqa: B006
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("the reward server is gone")
        return smooth_reward(images)

    model = module(SCHEDULES[name](), lr=1e-3)
    with live.hooks(), pytest.raises(RuntimeError, match="server is gone") as caught:
        fit(model, 4, root=tmp_path, scorer=Scorer(fail_in_the_third))
    assert caught.value is not None  # its traceback still holds every frame
    assert live.count()[0] == 0
    assert all(p.grad is None for p in model.policy.parameters())


def test_streaming_gradient_memory_does_not_grow_with_the_group(tmp_path):
    def peak(generations):
        policy = TinyPolicy(seed=1, hidden=48)
        sizes, high = {p.shape for p in policy.parameters()}, [0]

        class Watch(Callback):
            def on_rollout_end(self, trainer, pl_module, samples, scores):
                gc.collect()
                tensors = (o for o in gc.get_objects() if isinstance(o, torch.Tensor))
                held = sum(t.nbytes for t in tensors if t.shape in sizes and not isinstance(t, torch.nn.Parameter))
                high[0] = max(high[0], held)

        model = module(Reweight("streaming"), policy=policy, generations_per_prompt=generations, micro_batch=2)
        gc.collect()
        gc.freeze()  # what exists by now is neither collected nor listed again, which makes the count fast
        try:
            fit(model, 1, root=tmp_path, callbacks=[Watch()], prompts=("a red circle",))
        finally:
            gc.unfreeze()
        return high[0]

    assert peak(4) == peak(40) > 0


def test_dropped_samples_are_counted_and_the_rest_goes_on(tmp_path):
    def drop_one(images):
        scores = smooth_reward(images)
        scores[1] = math.nan
        return scores

    results = []
    for schedule in SCHEDULES.values():
        metrics = fit(module(schedule()), 1, root=tmp_path, scorer=Scorer(drop_one))
        assert metrics[0]["dropped_samples"] == 2
        results.append(metrics[0]["grad_norm"])
    torch.testing.assert_close(torch.tensor(results), torch.full((4,), results[0]), rtol=1e-5, atol=0)
    with pytest.raises(ValueError, match="every sample of iteration 0 was dropped"):
        fit(module(), 1, root=tmp_path, scorer=Scorer(lambda images: torch.full((len(images),), math.nan)))


def test_a_monitored_reward_without_any_score_stops_nothing(tmp_path):
    class Monitored(Scorer):
        def on_rollout_end(self, trainer, pl_module, samples, scores):
            super().on_rollout_end(trainer, pl_module, samples, scores)
            scores.values["broken"], scores.weights["broken"] = torch.full((len(samples),), math.nan), 0.0

    metrics = fit(module(), 1, root=tmp_path, scorer=Monitored())[0]
    assert math.isnan(metrics["reward/broken"]) and math.isnan(metrics["reward/broken_group_std"])
    assert metrics["dropped_samples"] == 0 and metrics["grad_norm"] > 0


def test_rewards_beyond_float64_are_refused_not_dropped(tmp_path):
    for scale, message in ((1e300, "no finite standard deviation"), (1e308, "overflows float64")):

        class Huge(Scorer):
            def on_rollout_end(self, trainer, pl_module, samples, scores):
                scores.values["reward"] = torch.linspace(0.5, 1, len(samples), dtype=torch.float64) * scale  # noqa: B023
                scores.weights["reward"] = 2.0

        with pytest.raises(ValueError, match=message):
            fit(module(), 1, root=tmp_path, scorer=Huge())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": torch.optim.LBFGS}, "LBFGS wants its loss again"),
        ({"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau wants a metric"),
    ],
)
def test_what_steps_on_more_than_the_gradient_is_refused_before_any_work(options, message, tmp_path):
    scorer = Scorer()
    with pytest.raises(ValueError, match=message):
        fit(module(**options), 1, root=tmp_path, scorer=scorer)
    assert scorer.sizes == []


def test_equal_rewards_move_nothing(tmp_path):
    model = module(lr=1.0)
    before = copy.deepcopy(model.policy.state_dict())
    metrics = fit(model, 3, root=tmp_path, scorer=Scorer(lambda images: torch.full((len(images),), 0.1)))
    assert all(torch.equal(before[k], v) for k, v in model.policy.state_dict().items())
    assert metrics[-1]["advantage/zero_groups"] == 1.0
    assert metrics[-1]["rows/backward"] == 0
    assert model.iteration == 3


def test_logged_numbers(tmp_path):
    metrics = fit(module(Native(), max_grad_norm=1e-3), 1, root=tmp_path)[0]
    assert metrics["rows/forward"] == 8 * (4 + 3)
    assert metrics["rows/backward"] == 8 * 3
    assert metrics["grad_norm"] > metrics["grad_norm_clipped"] == pytest.approx(1e-3)
    assert {f"seconds/{phase}" for phase in ("rollout", "decode", "reward", "update")} <= metrics.keys()
    assert metrics["peak_memory_mib"] > 0
    assert metrics["reward"] == pytest.approx(metrics["reward/reward"])
    assert metrics["reward_group_std"] > 0


def test_learning_rate_is_stepped_once_per_iteration(tmp_path):
    halve = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.5)
    for schedule in (Retain(), Native(updates_per_rollout=2)):
        metrics = fit(module(schedule, lr=1.0, lr_scheduler=halve), 3, root=tmp_path)
        assert [m["lr"] for m in metrics] == [1.0, 0.5, 0.25]


def test_sampling_is_reproducible_and_independent_of_the_batch():
    model = module()
    prompts, index = ["a red circle", "a red circle", "two blue squares"], torch.tensor([0, 0, 1])
    image = torch.tensor([0, 1, 0])
    together = model.sample(prompts, prompt_index=index, image_index=image)
    alone = model.sample(prompts[2:], prompt_index=index[2:], image_index=image[2:])
    torch.testing.assert_close(together[2:], alone, rtol=0, atol=1e-6)
    assert not torch.equal(together[0], together[1])
    other = model.sample(prompts, prompt_index=index, image_index=image, seed=1)
    assert not torch.equal(together, other)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generations_per_prompt": 1}, "generations_per_prompt=1.*a group of one has no advantage"),
        ({"groups_in_flight": 0}, "groups_in_flight=0"),
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"beta": -1.0}, "beta=-1"),
        ({"beta": math.nan}, "beta=nan"),
        ({"beta": math.inf}, "beta=inf.*finite"),
        ({"eval_num_steps": 0}, "num_steps = 0"),
        ({"max_grad_norm": 0.0}, "max_grad_norm=0.0.*null"),
        ({"clip_range": 0.0}, "clip_range=0.0"),
        ({"window": FixedWindow(3, 1), "transition": CPS(0.8)}, r"no noise at step\(s\) \[3\]"),
        ({"transition": ODE()}, "ODE adds no noise"),
        ({"window": Fraction(0.1)}, "fraction"),
        ({"num_steps": 1, "window": AllButLast()}, "num_steps = 1"),
    ],
)
def test_bad_arguments_are_refused_before_any_work(options, message):
    with pytest.raises(ValueError, match=message):
        module(**options)


def test_refusals_when_training_starts(tmp_path):
    with pytest.raises(ValueError, match=r"storage: streaming is exact only where.*clip: null"):
        fit(module(Reweight("streaming"), advantage=GroupAdvantage(clip=0.5)), 1, root=tmp_path)
    with pytest.raises(ValueError, match=r"no callback scored.*callbacks\.reward_scoring\.RewardScoring"):

        class Nobody(Scorer):
            def on_rollout_end(self, trainer, pl_module, samples, scores):
                pass

        fit(module(), 1, root=tmp_path, scorer=Nobody())
    with pytest.raises(ValueError, match=r"only 1 micro-batch.*samples_per_update: all"):
        fit(module(Native(updates_per_rollout=2)), 1, root=tmp_path, prompts=("a red circle",))


def test_half_precision_with_a_loss_scale_is_refused(tmp_path):
    with pytest.raises(ValueError, match="16-mixed.*bf16-mixed"):
        model = module()
        model._trainer = SimpleNamespace(world_size=1, precision="16-mixed", strategy=SingleDeviceStrategy("cpu"))  # type: ignore[assignment]
        model.setup("fit")


def test_an_endless_run_is_refused_at_its_start(tmp_path):
    scorer = Scorer()
    with pytest.raises(ValueError, match="max_epochs=-1: one epoch is the whole run"):
        fit(module(), 1, root=tmp_path, scorer=scorer, max_epochs=-1)
    assert scorer.sizes == []


def test_a_diverged_policy_stops_with_step_and_prompt(tmp_path):
    policy = TinyPolicy(seed=1)
    policy.register_forward_hook(lambda m, args, out: out * math.inf if float(args[1][0]) < 0.8 else out)
    with pytest.raises(ValueError, match=r"not finite after step 2 for \(prompt, generation\) \[\(0, 0\)"):
        fit(module(policy=policy), 1, root=tmp_path)

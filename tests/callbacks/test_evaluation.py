import csv

import pytest
import torch

from callbacks.checkpoint import IterationCheckpoint
from callbacks.evaluation import HeldOutEvaluation
from callbacks.reward_scoring import RewardScoring
from rewards.base import Reward
from tests.callbacks.miniature import PROMPTS, ByPrompt, MeanPixel, make_module


class Greedy(Reward):
    """Uses every global generator and leaves the modes it finds in disorder, as a foreign model may."""

    def __init__(self, module=None):
        self.module = module

    def score(self, images, prompts, metadata):
        if self.module is not None:
            self.module.policy.train()
        return torch.rand(len(prompts), dtype=torch.float64)


def fit(trainer, data, module=None, ckpt_path=None):
    module = module or make_module()
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module


def logged(tmp_path, name):
    with open(tmp_path / "run" / "metrics.csv") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


def test_fit_measures_before_and_after(make_trainer, make_data, tmp_path, capsys):
    evaluation = HeldOutEvaluation({"mean": MeanPixel()}, "mean")
    module = make_module()
    data = make_data()
    expected_before = torch.cat([module.test_step(batch, 0).images for batch in data.test_dataloader()]).double().mean()
    fit(make_trainer(RewardScoring({"mean": MeanPixel()}), evaluation), data, module)
    expected_after = torch.cat([module.test_step(batch, 0).images for batch in data.test_dataloader()]).double().mean()
    assert evaluation.before.estimate("mean").mean == pytest.approx(expected_before.item(), rel=1e-12)
    assert evaluation.after.estimate("mean").mean == pytest.approx(expected_after.item(), rel=1e-12)
    assert (evaluation.before.iteration, evaluation.after.iteration) == (0, 2)
    assert evaluation.before.images == (2,) * 6
    assert evaluation.seconds > 0
    assert logged(tmp_path, "held_out/mean") == {
        0: pytest.approx(expected_before.item()),
        2: pytest.approx(expected_after.item()),
    }
    assert set(logged(tmp_path, "held_out/mean/counting")) == {0, 2}
    printed = capsys.readouterr().out
    assert "evaluating held_out prompts at iteration 0 ..." in printed
    assert f"held_out mean {expected_after:.3f} +- " in printed


def test_the_validation_set_is_measured_every_so_often(make_trainer, make_data, tmp_path):
    evaluation = HeldOutEvaluation({"mean": MeanPixel()}, "mean", every=2)
    data = make_data(iterations=5, max_val_prompts=3)
    fit(make_trainer(RewardScoring({"mean": MeanPixel()}), evaluation), data)
    assert set(logged(tmp_path, "val/mean")) == {2, 4}


def test_training_is_bitwise_the_same_with_and_without_it(make_trainer, make_data):
    """Trained parameters, rewards and every global generator."""

    def run(*extra, module):
        torch.manual_seed(3)
        training = RewardScoring({"noisy": Greedy()})  # depends on the global generator
        fit(make_trainer(training, *extra), make_data(iterations=3), module)
        state = [p.detach().clone() for p in module.parameters()]
        return state, module.iteration_metrics["reward"], torch.get_rng_state(), [m.training for m in module.modules()]

    plain = run(module=make_module())
    module = make_module()
    watched = run(HeldOutEvaluation({"greedy": Greedy(module)}, "greedy", every=1), module=module)
    assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0], strict=True))
    assert plain[1] == watched[1]
    assert torch.equal(plain[2], watched[2])
    assert plain[3] == watched[3]
    assert all(p.grad is None for p in module.parameters())


def test_a_resumed_run_keeps_the_numbers_it_began_with(make_trainer, make_data, tmp_path):
    first = HeldOutEvaluation({"mean": MeanPixel()}, "mean")
    trainer = make_trainer(RewardScoring({"mean": MeanPixel()}), first)
    fit(trainer, make_data(iterations=2))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    second = HeldOutEvaluation({"mean": MeanPixel()}, "mean")
    trainer = make_trainer(RewardScoring({"mean": MeanPixel()}), second)
    fit(trainer, make_data(iterations=4), ckpt_path=tmp_path / "x.ckpt")
    assert torch.equal(second.before.means["mean"], first.before.means["mean"])
    assert (second.before.iteration, second.after.iteration) == (0, 4)
    assert second.seconds > first.seconds


class Interrupted(MeanPixel):
    """By Ctrl-C, in its fourth call."""

    calls = 0

    def score(self, images, prompts, metadata):
        self.calls += 1
        if self.calls == 4:
            raise KeyboardInterrupt
        return super().score(images, prompts, metadata)


def test_a_resumed_run_makes_up_for_a_validation_that_was_broken_off(make_trainer, make_data, tmp_path):
    """The test set takes three calls, so the fourth is in the validation after iteration 2."""
    reward = Interrupted()

    def run(ckpt_path=None):
        callbacks = HeldOutEvaluation({"r": reward}, "r", every=2), IterationCheckpoint()
        trainer = make_trainer(RewardScoring({"mean": MeanPixel()}), *callbacks, enable_checkpointing=True)
        fit(trainer, make_data(iterations=3), ckpt_path=ckpt_path)
        return set(logged(tmp_path, "val/r"))

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run()
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert run(last) == {2}
    assert reward.calls == 4 + 3 + 3  # and, in the end, the test set
    assert run(last) == set()  # nothing is due again


def test_a_test_set_that_changed_in_between_gives_no_change_to_report(make_trainer, make_data, tmp_path):
    trainer = make_trainer(RewardScoring({"mean": MeanPixel()}), HeldOutEvaluation({"mean": MeanPixel()}, "mean"))
    fit(trainer, make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    second = HeldOutEvaluation({"mean": MeanPixel()}, "mean")
    trainer = make_trainer(RewardScoring({"mean": MeanPixel()}), second)
    with pytest.warns(UserWarning, match="no change to report"):
        fit(trainer, make_data(iterations=3, images_per_prompt=3), ckpt_path=tmp_path / "x.ckpt")
    assert second.before is None
    assert second.after.iteration == 3


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_validate_and_test_report_the_same_numbers_as_fit(make_trainer, make_data, stage):
    fitted, alone = (HeldOutEvaluation({"mean": MeanPixel()}, "mean") for _ in range(2))
    module = fit(make_trainer(RewardScoring({"mean": MeanPixel()}), fitted), make_data())
    trainer = make_trainer(alone, limit_val_batches=1.0)
    (result,) = getattr(trainer, stage)(module, datamodule=make_data(eval_batch_size=7), verbose=False)
    prefix = {"validate": "val", "test": "test"}[stage]
    assert result == pytest.approx(fitted.after.scalars(prefix), rel=1e-6)


def test_the_sanity_check_of_fit_logs_nothing(make_trainer, make_data, tmp_path):
    evaluation = HeldOutEvaluation({"mean": MeanPixel()}, "mean")
    trainer = make_trainer(
        RewardScoring({"mean": MeanPixel()}), evaluation, limit_val_batches=1.0, num_sanity_val_steps=1
    )
    fit(trainer, make_data())
    assert set(logged(tmp_path, "val/mean")) == {2}  # the Trainer's own validation at the end of the epoch


@pytest.mark.parametrize("stage", ["fit", "test"])
def test_no_sample_is_dropped_silently(make_trainer, make_data, stage):
    reward = ByPrompt({PROMPTS[4]["prompt"]: float("nan")})
    callbacks = RewardScoring({"mean": MeanPixel()}), HeldOutEvaluation({"broken": reward}, "broken")
    with pytest.raises(ValueError, match=r"reward 'broken' failed in the (test|held-out evaluation at iteration 0) on"):
        getattr(make_trainer(*callbacks), stage)(make_module(), datamodule=make_data())


def test_arguments_are_checked():
    with pytest.raises(ValueError, match="main='b' is none of"):
        HeldOutEvaluation({"a": MeanPixel()}, "b")
    with pytest.raises(ValueError, match="every=-1"):
        HeldOutEvaluation({"a": MeanPixel()}, "a", every=-1)


def test_a_missing_test_set_stops_fit_at_the_start(make_trainer, make_data):
    evaluation = HeldOutEvaluation({"a": MeanPixel()}, "a")
    with pytest.raises(ValueError, match=r"data\.init_args\.test"):
        make_trainer(RewardScoring({"a": MeanPixel()}), evaluation).fit(make_module(), datamodule=make_data(test=None))
    with pytest.raises(ValueError, match=r"data\.init_args\.val"):
        make_trainer(HeldOutEvaluation({"a": MeanPixel()}, "a", every=1)).fit(
            make_module(), datamodule=make_data(val=None)
        )


def test_what_it_measures_is_known_to_other_callbacks(make_trainer, make_data):
    """At the iteration it is of, and no longer."""
    seen = {}

    class Looks(RewardScoring):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen[pl_module.iteration] = pl_module.iteration_metrics.get("val/mean")

    evaluation = HeldOutEvaluation({"mean": MeanPixel()}, "mean", every=2)
    trainer = make_trainer(evaluation, Looks({"mean": MeanPixel()}))
    fit(trainer, make_data(iterations=3))
    assert seen[1] is seen[3] is None
    assert seen[2] == pytest.approx(trainer.callback_metrics["val/mean"].item())

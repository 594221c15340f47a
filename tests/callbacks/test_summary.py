import csv
import json
import re

import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks.evaluation import HeldOutEvaluation
from callbacks.prompt_set_evaluation import PromptSetEvaluation
from callbacks.reward_scoring import RewardScoring
from callbacks.sample_grid import SampleGrid
from callbacks.summary import CHARTS, Summary
from lightning_modules.schedules.native import Native
from tests.callbacks.miniature import PROMPTS, ByPrompt, MeanPixel, make_module


def strict(text):
    def refuse(constant):
        raise AssertionError(f"{constant} is no JSON")

    return json.loads(text, parse_constant=refuse)


def run(make_trainer, data, tmp_path, *callbacks, ckpt_path=None, reward=None, **changes):
    trainer = make_trainer(RewardScoring({"mean": reward or MeanPixel()}), *callbacks, Summary())
    trainer.fit(make_module(**changes), datamodule=data, ckpt_path=ckpt_path)
    return strict((tmp_path / "run" / "summary.json").read_text()), trainer


def test_the_file_and_the_table_hold_the_evaluations_numbers(make_trainer, make_data, tmp_path, capsys):
    evaluation = HeldOutEvaluation({"mean": MeanPixel(), "other": MeanPixel()}, "mean")
    summary, _ = run(make_trainer, make_data(), tmp_path, evaluation, SampleGrid(), seed=5)
    held = summary["held_out_reward"]
    before, after = evaluation.before, evaluation.after
    change = after.change(before, "mean")
    assert held["name"] == "mean"
    assert (held["before"], held["after"]) == (before.estimate("mean").mean, after.estimate("mean").mean)
    assert (held["difference"], held["stderr"]) == (change.mean, change.stderr)
    assert held["before_stderr"] == before.estimate("mean").stderr
    assert held["after_stderr"] == after.estimate("mean").stderr
    assert (held["prompts"], held["images_per_prompt"], held["before_iteration"]) == (6, 2, 0)
    assert held["per_category"]["counting"] == {
        "before": before.estimate("mean", "counting").mean,
        "after": after.estimate("mean", "counting").mean,
    }
    assert {"name": "mean"} | summary["other_held_out_rewards"]["other"] == held
    assert (summary["schedule"], summary["iterations"], summary["samples"], summary["seed"]) == ("Retain", 2, 8, 5)
    assert torch.__version__.startswith(summary["versions"]["torch"].split("+")[0])
    printed = capsys.readouterr().out
    assert f"{held['before']:.3f} +- {held['before_stderr']:.3f}" in printed
    assert f"{held['difference']:+.3f} +- {held['stderr']:.3f}" in printed
    assert f"tensorboard --logdir {tmp_path / 'run'}" in printed
    assert str(tmp_path / "run" / "summary.json") in printed


def test_time_is_told_apart_and_adds_up(make_trainer, make_data, tmp_path):
    summary, _ = run(make_trainer, make_data(), tmp_path, HeldOutEvaluation({"m": MeanPixel()}, "m"), SampleGrid())
    seconds = summary["seconds"]
    assert set(seconds) == {"rollout", "decode", "reward", "update", "verify", "evaluation", "samples", "total"}
    assert all(seconds[p] > 0 for p in ("rollout", "decode", "reward", "update", "evaluation", "samples"))
    assert seconds["verify"] == 0
    assert sum(s for p, s in seconds.items() if p != "total") < seconds["total"]


@pytest.mark.parametrize(("schedule", "forward"), [(None, 3), (Native(), 5)])
def test_policy_rows_against_native(make_trainer, make_data, tmp_path, schedule, forward):
    """T = 3 steps of which 2 are trained: Native runs 5 rows a sample, Retain 3."""
    changes = {"schedule": schedule} if schedule else {}
    summary, _ = run(make_trainer, make_data(), tmp_path, **changes)
    rows = summary["policy_rows"]
    assert rows["native_forward"] == 8 * 5
    assert rows["forward"] == 8 * forward
    assert rows["backward"] == 8 * 2
    assert rows["saved_share"] == pytest.approx(1 - forward / 5)


def test_a_verification_counts_once_an_iteration_it_took_place(make_trainer, make_data, tmp_path):
    summary, _ = run(make_trainer, make_data(iterations=3), tmp_path, verify_every=2)
    extra = summary["policy_rows"]["forward"] - 12 * 3
    assert extra == 2 * 2 * 2  # iterations 0 and 2, both trained steps of one group of two
    assert summary["seconds"]["verify"] > 0


def test_without_an_evaluation_it_says_so(make_trainer, make_data, tmp_path, capsys):
    summary, _ = run(make_trainer, make_data(), tmp_path)
    assert summary["held_out_reward"] is None
    assert "not evaluated" in capsys.readouterr().out


def test_a_single_prompt_has_null_for_a_standard_error(make_trainer, make_data, tmp_path, capsys):
    evaluation = HeldOutEvaluation({"m": MeanPixel()}, "m")
    data = make_data(prompts=PROMPTS[:1], prompts_per_step=1)
    summary, _ = run(make_trainer, data, tmp_path, evaluation)
    assert summary["held_out_reward"]["stderr"] is None
    assert summary["held_out_reward"]["difference"] is not None
    assert "+- n/a" in capsys.readouterr().out


def test_a_resumed_run_reports_the_whole(make_trainer, make_data, tmp_path):
    first, trainer = run(make_trainer, make_data(iterations=2), tmp_path, HeldOutEvaluation({"m": MeanPixel()}, "m"))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    evaluation = HeldOutEvaluation({"m": MeanPixel()}, "m")
    whole, _ = run(make_trainer, make_data(iterations=5), tmp_path, evaluation, ckpt_path=tmp_path / "x.ckpt")
    assert (whole["iterations"], whole["samples"]) == (5, 20)
    assert whole["policy_rows"]["forward"] == 20 * 3
    assert whole["held_out_reward"]["before"] == first["held_out_reward"]["before"]
    assert whole["seconds"]["total"] > first["seconds"]["total"]


def test_dropped_samples_are_told(make_trainer, make_data, tmp_path, capsys):
    reward = ByPrompt({}, 0.0)
    reward.score = lambda images, prompts, metadata: torch.tensor([float("nan"), *[1.0] * (len(prompts) - 1)])
    trainer = make_trainer(RewardScoring({"r": reward}, on_error="drop"), Summary())
    with pytest.warns(UserWarning, match="failed"):
        trainer.fit(make_module(generations_per_prompt=3), datamodule=make_data())
    assert strict((tmp_path / "run" / "summary.json").read_text())["dropped_samples"] == 4
    assert "(4 dropped)" in capsys.readouterr().out


def test_training_held_out_and_evaluation_stand_side_by_side(make_trainer, make_data, tmp_path, capsys):
    data = make_data(iterations=5)
    benchmark = PromptSetEvaluation(
        name="set", prompts=data.files["test"], rewards={"m": MeanPixel()}, main="m", images_per_prompt=2, batch_size=5
    )
    held_out = HeldOutEvaluation({"m": MeanPixel()}, "m")
    summary, _ = run(make_trainer, data, tmp_path, held_out, benchmark)
    with open(tmp_path / "run" / "metrics.csv") as file:
        rewards = [float(row["reward"]) for row in csv.DictReader(file) if row["reward"]]
    expected = {"first": sum(rewards[:2]) / 2, "last": sum(rewards[-2:]) / 2, "iterations": 2}
    assert summary["training_rewards"] == {"reward": pytest.approx(expected), "reward/mean": pytest.approx(expected)}
    evaluated = summary["evaluations"]["set"]["m"]
    held = {name: value for name, value in summary["held_out_reward"].items() if name not in ("name", "per_category")}
    assert evaluated == pytest.approx(held, abs=2e-3)  # the same images, rounded to 8 bits
    assert (evaluated["before_iteration"], evaluated["after_iteration"]) == (0, 5)
    assert summary["evaluations"]["set"]["m/counting"]["after"] == benchmark.last.estimate("m", "counting").mean
    assert summary["seconds"]["evaluation"] == pytest.approx(held_out.seconds + benchmark.seconds)
    printed = capsys.readouterr().out
    assert f"set m{'':<19}{evaluated['before']:.3f} +- " in printed
    assert f"  reward{'':<16}{expected['first']:.3f}{'':<15}{expected['last']:.3f}" in printed


def test_an_evaluation_that_took_place_once_has_no_change(make_trainer, make_data, tmp_path):
    data = make_data()
    once = PromptSetEvaluation(
        name="set", prompts=data.files["test"], rewards={"m": MeanPixel()}, main="m", images_per_prompt=1, after=False
    )
    summary, _ = run(make_trainer, data, tmp_path, once)
    row = summary["evaluations"]["set"]["m"]
    assert row["before"] is row["difference"] is None and row["after"] == once.first.estimate("m").mean


def test_training_rewards_of_a_resumed_run_are_of_the_whole(make_trainer, make_data, tmp_path):
    first, trainer = run(make_trainer, make_data(iterations=2), tmp_path)
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    whole, _ = run(make_trainer, make_data(iterations=4), tmp_path, ckpt_path=tmp_path / "x.ckpt")
    assert whole["training_rewards"]["reward"]["iterations"] == 2
    both = [first["training_rewards"]["reward"][end] for end in ("first", "last")]
    assert whole["training_rewards"]["reward"]["first"] == pytest.approx(sum(both) / 2)


def test_tensorboard_has_one_chart_of_every_reward(make_trainer, make_data, tmp_path):
    """The chart's patterns pick the rewards among what was logged, without their errors and spreads."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    data = make_data()
    callbacks = (
        HeldOutEvaluation({"m": MeanPixel()}, "m", every=1),
        PromptSetEvaluation(
            name="set", prompts=data.files["test"], rewards={"m": MeanPixel()}, main="m", images_per_prompt=1
        ),
    )
    loggers = [TensorBoardLogger(tmp_path, name="", version="run")]
    trainer = make_trainer(RewardScoring({"mean": MeanPixel()}), *callbacks, Summary(), logger=loggers)
    trainer.fit(make_module(), datamodule=data)
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    tags = events.Tags()["scalars"]
    _, patterns = CHARTS["reward"]["training, held out, evaluated"]
    shown = {tag for tag in tags if any(re.match(pattern, tag) for pattern in patterns)}
    assert shown == {"reward", "reward/mean", "held_out/m", "val/m", "eval/set"}
    assert b"training, held out, evaluated" in events.Tensors("custom_scalars__config__")[0].tensor_proto.string_val[0]

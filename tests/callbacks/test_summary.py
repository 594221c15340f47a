import json

import pytest
import torch

from callbacks.evaluation import HeldOutEvaluation
from callbacks.reward_scoring import RewardScoring
from callbacks.sample_grid import SampleGrid
from callbacks.summary import Summary
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

"""The frame of every benchmark, through the simplest of them: when it runs, what it draws, what it writes, what it leaves."""

import csv
import errno
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from PIL import Image

from callbacks import benchmark as frame
from callbacks.best_checkpoint import BestCheckpoint
from callbacks.checkpoint import IterationCheckpoint
from callbacks.compare import compare
from callbacks.ema import EMA
from callbacks.prompt_set_evaluation import PromptSetEvaluation
from callbacks.results import read_result
from callbacks.reward_scoring import RewardScoring
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.types import DrawingSettings
from rewards.base import Reward
from tests.callbacks.miniature import PROMPTS, ByPrompt, MeanPixel, make_module
from tests.tiny import TinyPolicy

TRAINING = {"mean": MeanPixel()}


class Watched(MeanPixel):
    """Notes what is done to it, and uses every global generator."""

    def __init__(self):
        self.events, self.images = [], []

    def load(self):
        self.events.append("load")

    def to(self, device):
        self.events.append(f"to {device}")

    def score(self, images, prompts, metadata):
        self.events.append("score")
        self.images.append(images.clone())
        random.random(), np.random.rand(), torch.rand(1)
        return super().score(images, prompts, metadata)

    def identity(self):
        return super().identity() | {"version": 3}


class Missing(MeanPixel):
    def load(self):
        raise ValueError("no weights in /nowhere: get them by `hf download x`")


@pytest.fixture
def make_set(tmp_path):
    def make(reward=None, prompts=PROMPTS, **changes):
        file = tmp_path / "set.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
        settings = {"name": "set", "prompts": str(file), "rewards": {"r": reward or Watched()}, "main": "r",
                    "images_per_prompt": 3, "batch_size": 4, "before": False, "after": False}  # fmt: skip
        return PromptSetEvaluation(**(settings | changes))

    return make


def fit(trainer, data, module=None, ckpt_path=None):
    module = module or make_module()
    trainer.fit(module, datamodule=data, ckpt_path=ckpt_path)
    return module


def folders(tmp_path, name="set"):
    return sorted(path.name for path in (tmp_path / "run" / "evaluations" / name).iterdir())


def result_of(tmp_path, iteration, name="set"):
    return read_result(tmp_path / "run" / "evaluations" / name / f"iteration_{iteration:06d}")


def logged(tmp_path, name):
    with open(tmp_path / "run" / "metrics.csv") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row.get(name)}


# when

WHEN = [
    ({}, None),
    ({"before": True}, [0]),
    ({"after": True}, [3]),
    ({"every": 2}, [2]),
    ({"every": 3, "after": True}, [3]),  # not twice
    ({"every": 1, "before": True, "after": True}, [0, 1, 2, 3]),
]


@pytest.mark.parametrize(("when", "iterations"), WHEN)
def test_it_runs_in_fit_when_asked(make_trainer, make_data, make_set, tmp_path, when, iterations):
    reward = Watched()
    fit(make_trainer(RewardScoring(TRAINING), make_set(reward, **when)), make_data(iterations=3))
    if iterations is None:
        assert reward.events == []
        assert not (tmp_path / "run" / "evaluations").exists()
    else:
        assert folders(tmp_path) == [f"iteration_{i:06d}" for i in iterations]
        assert set(logged(tmp_path, "eval/set")) == set(iterations)


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_alone_it_gives_the_numbers_of_fit(make_trainer, make_data, make_set, tmp_path, stage):
    """With the datamodule's own prompts cut short, and whatever these are."""
    module = fit(make_trainer(RewardScoring(TRAINING), make_set(after=True)), make_data())
    fitted = result_of(tmp_path, 2)
    trainer = make_trainer(make_set(), limit_val_batches=1, limit_test_batches=1)
    (values,) = getattr(trainer, stage)(module, datamodule=make_data(prompts=PROMPTS[:2]), verbose=False)
    alone = result_of(tmp_path, 2)
    assert {k: v for k, v in alone.items() if k != "prompts_file"} == {
        k: v for k, v in fitted.items() if k != "prompts_file"
    }
    assert values["eval/set"] == pytest.approx(fitted["metrics"]["r"]["mean"])
    assert values["eval/set/r/counting"] == pytest.approx(fitted["metrics"]["r/counting"]["mean"])


def test_the_trainers_own_validation_in_fit_is_left_alone(make_trainer, make_data, make_set, tmp_path):
    trainer = make_trainer(RewardScoring(TRAINING), make_set(), limit_val_batches=1.0, num_sanity_val_steps=1)
    fit(trainer, make_data())
    assert not (tmp_path / "run" / "evaluations").exists()


def test_where_the_loop_has_nothing_to_draw_it_says_that_it_did_not_run(make_trainer, make_data, make_set):
    trainer = make_trainer(make_set(), limit_val_batches=0)
    with pytest.warns(UserWarning, match="benchmark 'set' did not run.*limit_val_batches"):
        trainer.validate(make_module(), datamodule=make_data(), verbose=False)


# what is drawn and scored


def test_images_are_the_modules_own_rounded_to_eight_bits(make_trainer, make_data, make_set, tmp_path):
    """Whatever the batches; and what is scored is what is in the files."""
    reward = Watched()
    module = fit(make_trainer(RewardScoring(TRAINING), make_set(reward, after=True, seed=5)), make_data())
    ids = torch.tensor([(p, i) for p in range(6) for i in range(3)])
    texts = [PROMPTS[p]["prompt"] for p in ids[:, 0].tolist()]
    drawn = module.sample(texts, prompt_index=ids[:, 0], image_index=ids[:, 1], seed=5)
    expected = (drawn * 255).round() / 255
    scored = torch.cat(reward.images)
    assert (scored - expected).abs().max() <= 1 / 255 + 1e-6 and (scored != expected).float().mean() < 0.05
    folder = tmp_path / "run" / "evaluations" / "set" / "iteration_000002"
    for (p, i), image in zip(ids.tolist(), scored, strict=True):
        file = np.asarray(Image.open(folder / "images" / f"{p:05d}_{i}.png"))
        assert (file == (image * 255).round().permute(1, 2, 0).numpy()).all()
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert [line["filename"] for line in lines] == [f"images/{p:05d}_{i}.png" for p, i in ids.tolist()]
    assert [line["scores"]["r"] for line in lines] == pytest.approx(scored.double().flatten(1).mean(1).tolist())
    result = result_of(tmp_path, 2)
    assert result["metrics"]["r"]["mean"] == pytest.approx(scored.double().mean().item())
    assert result["metrics"]["r/position"]["mean"] == pytest.approx(scored[-6:].double().mean().item())


def test_settings_of_its_own(make_trainer, make_data, make_set, tmp_path):
    guided = make_module(policy=ClassifierFreeGuidance(TinyPolicy(), 1.0, "zz"), num_steps=3)
    settings = DrawingSettings(num_steps=5, guidance=3.0)
    fit(make_trainer(RewardScoring(TRAINING), make_set(before=True, sampler=settings)), make_data(), guided)
    other = make_module(policy=ClassifierFreeGuidance(TinyPolicy(), 3.0, "zz"), num_steps=3, eval_num_steps=5)
    fit(make_trainer(RewardScoring(TRAINING), make_set(before=True, name="other")), make_data(), other)
    mine, theirs = result_of(tmp_path, 0), result_of(tmp_path, 0, "other")
    assert mine["settings"] == theirs["settings"]
    assert mine["prompts"] == theirs["prompts"]
    assert (mine["settings"]["sampler"]["num_steps"], mine["settings"]["sampler"]["guidance"]) == (5, 3.0)
    assert guided.policy.scale == 1.0


def test_averaged_weights_are_used_and_told(make_trainer, make_data, make_set, tmp_path):
    """An average of decay 0.999 has hardly moved; the trained weights have."""
    fit(make_trainer(RewardScoring(TRAINING), make_set(before=True)), make_data())
    untrained = result_of(tmp_path, 0)
    module = fit(make_trainer(RewardScoring(TRAINING), EMA(decay=0.1), make_set(after=True)), make_data(iterations=3))
    averaged = result_of(tmp_path, 3)
    assert averaged["model"]["averaged"] and not untrained["model"]["averaged"]
    assert averaged["model"]["trained_weights"] != module.identity()["trained_weights"]
    make_trainer(make_set(), limit_val_batches=1).validate(module, datamodule=make_data(), verbose=False)
    raw = result_of(tmp_path, 3)
    assert raw["model"]["trained_weights"] == module.identity()["trained_weights"]
    assert raw["metrics"]["r"]["mean"] != averaged["metrics"]["r"]["mean"]


def test_an_ema_listed_later_counts_in_validate(make_trainer, make_data, make_set, tmp_path):
    ema = EMA(decay=0.1)
    trainer = make_trainer(RewardScoring(TRAINING), ema)
    module = fit(trainer, make_data(iterations=3))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    trainer = make_trainer(make_set(), EMA(decay=0.1), limit_val_batches=1)
    trainer.validate(module, datamodule=make_data(), ckpt_path=str(tmp_path / "x.ckpt"), verbose=False)
    result = result_of(tmp_path, 3)
    assert result["model"]["averaged"]
    assert len(result["checkpoint"]["sha256"]) == 64 and result["checkpoint"]["path"] == str(tmp_path / "x.ckpt")


def test_rewards_are_loaded_at_the_start_and_make_room_afterwards(make_trainer, make_data, make_set):
    reward = Watched()
    fit(make_trainer(RewardScoring(TRAINING), make_set(reward, every=2)), make_data())
    assert reward.events == ["load", *["score"] * 5, "to cpu"]


# what is written


def test_the_result_carries_what_produced_it(make_trainer, make_data, make_set, tmp_path):
    module = fit(make_trainer(RewardScoring(TRAINING), make_set(after=True)), make_data())
    result = result_of(tmp_path, 2)
    settings, model = result["settings"], result["model"]
    assert settings["prompts"] | {"sha256": None} == {
        "sha256": None, "category": "tag", "number": 6, "images_per_prompt": 3, "images": 18,
    }  # fmt: skip
    assert settings["sampler"]["sigmas"] == pytest.approx(module.eval_sigma_grid.tolist())
    assert settings["sampler"]["precision"] == "32-true"
    assert settings["noise"]["seed"] == 0
    assert settings["rewards"]["r"] == {"class": f"{Watched.__module__}.Watched", "version": 3}
    assert (model["iteration"], model["averaged"]) == (2, False)
    assert model["policy"]["class"] == "tests.tiny.TinyPolicy"
    assert model["trained_weights"] == module.identity()["trained_weights"]
    assert torch.__version__.startswith(result["versions"]["torch"].split("+")[0])
    assert result["checkpoint"] is None and result["device"] == "cpu"
    assert [row["prompt"] for row in result["prompts"]] == [row["prompt"] for row in PROMPTS]
    assert all(len(row["scores"]["r"]) == 3 for row in result["prompts"])


def test_two_runs_of_one_seed_write_the_same_files(make_trainer, make_data, make_set, tmp_path):
    def run(name):
        fit(make_trainer(RewardScoring(TRAINING), make_set(after=True, name=name)), make_data())
        folder = tmp_path / "run" / "evaluations" / name / "iteration_000002"
        return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}

    one, two = run("one"), run("two")
    one_text, two_text = (files.pop(Path("result.json")).decode() for files in (one, two))
    assert one_text.replace('"one"', '"two"') == two_text
    del one[Path("best_median_worst.png")], two[Path("best_median_worst.png")]  # the name is in it
    assert one == two and len(one) == 18 + 1


def test_images_go_if_they_are_not_wanted(make_trainer, make_data, make_set, tmp_path):
    fit(make_trainer(RewardScoring(TRAINING), make_set(after=True, keep_images=False)), make_data())
    names = sorted(os.listdir(tmp_path / "run" / "evaluations" / "set" / "iteration_000002"))
    assert names == ["best_median_worst.png", "result.json", "results.jsonl"]


def test_tensorboard_gets_numbers_and_picture(make_trainer, make_data, make_set, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    loggers = [TensorBoardLogger(tmp_path, name="", version="run"), CSVLogger(tmp_path, name="", version="run")]
    fit(make_trainer(RewardScoring(TRAINING), make_set(every=1), logger=loggers), make_data())
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    assert [event.step for event in events.Scalars("eval/set")] == [1, 2]
    assert {"eval/set_stderr", "eval/set/r/colors"} <= set(events.Tags()["scalars"])
    assert [event.step for event in events.Images("eval/set")] == [1, 2]


# what is left as it was


def test_training_is_bitwise_the_same_with_and_without_it(make_trainer, make_data, make_set):
    """Trained parameters, optimizer, rewards, every global generator and module modes."""

    def run(*extra):
        random.seed(1), np.random.seed(1), torch.manual_seed(3)
        module = make_module(
            policy=ClassifierFreeGuidance(TinyPolicy(), 2.0, "zz"), optimizer=lambda p: torch.optim.AdamW(p, lr=0.01)
        )
        trainer = make_trainer(RewardScoring({"noisy": Watched()}), *extra)
        fit(trainer, make_data(iterations=3), module)
        tensors = [*module.state_dict().values(), torch.get_rng_state()]
        for state in trainer.optimizers[0].state.values():
            tensors += list(state.values())
        return tensors, [random.getstate(), str(np.random.get_state())], module

    plain = run()
    watched = run(make_set(every=1, before=True, after=True, sampler=DrawingSettings(num_steps=4, guidance=1.0)))
    assert len(plain[0]) == len(watched[0]) > 10
    assert all(torch.equal(a, b) for a, b in zip(plain[0], watched[0], strict=True))
    assert plain[1] == watched[1]
    assert plain[2].iteration_metrics["reward"] == watched[2].iteration_metrics["reward"]


# resume


def test_a_resumed_run_keeps_its_first_numbers(make_trainer, make_data, make_set, tmp_path):
    first = make_set(before=True, after=True)
    trainer = make_trainer(RewardScoring(TRAINING), first)
    fit(trainer, make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    second, reward = make_set(reward := Watched(), before=True, after=True), reward
    fit(make_trainer(RewardScoring(TRAINING), second), make_data(iterations=4), ckpt_path=tmp_path / "x.ckpt")
    assert torch.equal(second.first.means["r"], first.first.means["r"])
    assert (second.first.iteration, second.last.iteration) == (0, 4)
    assert reward.events.count("score") == 5  # after training alone
    assert second.seconds > first.seconds


def test_several_in_a_run_keep_their_own_numbers(make_trainer, make_data, make_set, tmp_path):
    def some():
        return [make_set(name=name, main=name, rewards={name: ByPrompt({}, score)}, before=True, after=True)
                for name, score in (("one", 1.0), ("two", 2.0))]  # fmt: skip

    trainer = make_trainer(RewardScoring(TRAINING), *some())
    fit(trainer, make_data())
    assert [result_of(tmp_path, 2, name)["metrics"][name]["mean"] for name in ("one", "two")] == [1.0, 2.0]
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    resumed = some()
    fit(make_trainer(RewardScoring(TRAINING), *resumed), make_data(iterations=3), ckpt_path=tmp_path / "x.ckpt")
    assert [(e.first.iteration, e.last.iteration) for e in resumed] == [(0, 3)] * 2
    assert [list(e.first.means) for e in resumed] == [["one"], ["two"]]


def test_two_of_one_name_would_share_a_folder(make_trainer, make_data, make_set):
    class Another(PromptSetEvaluation):
        pass

    other = Another(name="set", prompts=make_set().prompts, rewards={"r": MeanPixel()}, main="r")
    with pytest.raises(ValueError, match="two benchmarks are named 'set' and would write to one folder"):
        fit(make_trainer(RewardScoring(TRAINING), make_set(after=True), other), make_data())


def test_after_a_change_of_settings_there_is_no_change_to_report(make_trainer, make_data, make_set, tmp_path):
    trainer = make_trainer(RewardScoring(TRAINING), make_set(before=True, after=True))
    fit(trainer, make_data())
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    other = make_set(before=True, after=True, seed=1)
    trainer = make_trainer(RewardScoring(TRAINING), other)
    with pytest.warns(UserWarning, match="'set' has other settings than when this run began"):
        fit(trainer, make_data(iterations=3), ckpt_path=tmp_path / "x.ckpt")
    assert other.first is None and other.last.iteration == 3


class FailsOnce(MeanPixel):
    def __init__(self):
        self.failed = False

    def score(self, images, prompts, metadata):
        if not self.failed:
            self.failed = True
            raise KeyboardInterrupt
        return super().score(images, prompts, metadata)


def test_one_that_is_broken_off_is_made_up_for_in_the_resumed_run(make_trainer, make_data, make_set, tmp_path):
    """Also for the best checkpoint, which is a whole one."""
    reward, checkpoints = FailsOnce(), tmp_path / "run" / "checkpoints"

    def run(ckpt_path=None):
        callbacks = (
            EMA(decay=0.5),
            make_set(reward, every=2),
            BestCheckpoint("eval/set", "min"),
            IterationCheckpoint(every=1),
        )
        trainer = make_trainer(RewardScoring(TRAINING), *callbacks, enable_checkpointing=True)
        return fit(trainer, make_data(iterations=3), ckpt_path=ckpt_path)

    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run()
    module = run(checkpoints / "last.ckpt")
    assert module.iteration == 3 and folders(tmp_path) == ["iteration_000002"]
    broken_off, made_up = (
        torch.load(checkpoints / f, weights_only=True) for f in ("iteration_000002.ckpt", "best.ckpt")
    )
    assert made_up["lean_grpo"]["iteration"] == 2 and made_up["loops"] == broken_off["loops"]
    again = run(checkpoints / "best.ckpt")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))


# failures


def test_missing_weights_stop_the_run_before_any_work(make_trainer, make_data, make_set):
    training = Watched()
    with pytest.raises(ValueError, match="no weights in /nowhere"):
        fit(make_trainer(RewardScoring({"t": training}), make_set(Missing(), after=True)), make_data())
    assert "score" not in training.events


def test_an_empty_prompt_set_stops_the_run(make_trainer, make_data, make_set):
    with pytest.raises(ValueError, match="set.jsonl holds no prompt"):
        fit(make_trainer(RewardScoring(TRAINING), make_set(prompts=[], after=True)), make_data())


def test_settings_that_the_policy_cannot_follow_stop_the_run(make_trainer, make_data, make_set):
    settings = DrawingSettings(guidance=4.0)
    with pytest.raises(ValueError, match="guidance=4.0.*wrap it in ClassifierFreeGuidance"):
        fit(make_trainer(RewardScoring(TRAINING), make_set(sampler=settings, after=True)), make_data())


def test_a_score_that_is_not_finite_leaves_no_result(make_trainer, make_data, make_set, tmp_path):
    reward = ByPrompt({PROMPTS[4]["prompt"]: float("nan")})
    with pytest.raises(
        ValueError, match="reward 'r' failed in benchmark 'set' at iteration 2 on prompt 'prompt number 4"
    ):
        fit(make_trainer(RewardScoring(TRAINING), make_set(reward, after=True)), make_data())
    assert os.listdir(tmp_path / "run" / "evaluations" / "set") == []


class FullDisk:
    """``Image.save`` fails from its n-th call on."""

    def __init__(self, after):
        self.left, self.real = after, Image.Image.save

    def __call__(self, picture, *arguments, **options):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.real(picture, *arguments, **options)


@pytest.mark.parametrize("after", [7, 18])  # in the middle of the images, and at the last picture
def test_a_full_disk_says_so_and_a_rerun_starts_over(make_trainer, make_data, make_set, tmp_path, monkeypatch, after):
    trainer = make_trainer(make_set(), limit_val_batches=1)
    disk = FullDisk(after)
    with monkeypatch.context() as patch:
        patch.setattr(Image.Image, "save", lambda *a, **o: disk(*a, **o))
        with pytest.raises(
            ValueError, match="cannot write .*iteration_000000.*: No space left on device; free some space"
        ):
            trainer.validate(make_module(), datamodule=make_data(), verbose=False)
    assert os.listdir(tmp_path / "run" / "evaluations" / "set") == []
    make_trainer(make_set(), limit_val_batches=1).validate(make_module(), datamodule=make_data(), verbose=False)
    assert folders(tmp_path) == ["iteration_000000"]
    assert len(result_of(tmp_path, 0)["prompts"]) == 6


class Killed(Reward):
    def score(self, images, prompts, metadata):
        raise KeyboardInterrupt


def test_an_evaluation_that_is_broken_off_starts_over(make_trainer, make_data, make_set, tmp_path):
    trainer = make_trainer(make_set(Killed()), limit_val_batches=1)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.validate(make_module(), datamodule=make_data(), verbose=False)
    assert os.listdir(tmp_path / "run" / "evaluations" / "set") == []
    make_trainer(make_set(), limit_val_batches=1).validate(make_module(), datamodule=make_data(), verbose=False)
    assert folders(tmp_path) == ["iteration_000000"]


def test_long_evaluations_say_how_far_they_are(make_trainer, make_data, make_set, capsys, monkeypatch):
    monkeypatch.setattr(frame, "SECONDS_BETWEEN_LINES", -1.0)
    fit(make_trainer(RewardScoring(TRAINING), make_set(after=True)), make_data())
    printed = capsys.readouterr().out
    assert "benchmark 'set' at iteration 2: 6 prompts x 3 images ..." in printed
    assert "benchmark 'set' at iteration 2: 3 of 5 batches" in printed


def test_results_of_a_run_can_be_compared(make_trainer, make_data, make_set, tmp_path):
    evaluation = make_set(before=True, after=True)
    fit(make_trainer(RewardScoring(TRAINING), evaluation), make_data())
    (overall, *_) = compare(result_of(tmp_path, 0), result_of(tmp_path, 2))
    assert overall.paired
    assert overall.change == evaluation.last.change(evaluation.first, "r")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images_per_prompt": 0}, "images_per_prompt=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"every": -1}, "every=-1"),
        ({"name": "a/b"}, "name='a/b'"),
        ({"name": ""}, "name=''"),
        ({"name": ".."}, "name='..'"),
        ({"main": "x"}, "main='x' is none of"),
        ({"rewards": {}}, "rewards is empty"),
    ],
)
def test_arguments_are_checked(make_set, changes, message):
    with pytest.raises(ValueError, match=message):
        make_set(**changes)

import io
import re
import sys
import time

import pytest
from lightning.pytorch import Callback

from callbacks.progress import IterationProgress, _clock
from callbacks.reward_scoring import RewardScoring
from tests.callbacks.miniature import MeanPixel, make_module


class Terminal(io.StringIO):
    def isatty(self):
        return True


def fit(make_trainer, data, bar, ckpt_path=None):
    trainer = make_trainer(RewardScoring({"mean": MeanPixel()}), bar, enable_progress_bar=True)
    trainer.fit(make_module(), datamodule=data, ckpt_path=ckpt_path)
    return trainer


def lines(text):
    return [line for line in text.splitlines() if line.startswith("iteration")]


def test_without_a_terminal_there_are_plain_lines(make_trainer, make_data, capsys):
    fit(make_trainer, make_data(iterations=3), IterationProgress(seconds_between_lines=0))
    printed = capsys.readouterr().out
    assert "\r" not in printed
    found = lines(printed)
    assert [line.split("  ")[0] for line in found] == ["iteration 1/3", "iteration 2/3", "iteration 3/3"]
    pattern = r"iteration 3/3  reward \S+  grad_norm \S+  \d+\.\d\d s/iteration  0:00 left"
    assert re.fullmatch(pattern, found[-1])


def test_lines_keep_their_distance_but_the_first_and_the_last_always_come(make_trainer, make_data, capsys):
    fit(make_trainer, make_data(iterations=4), IterationProgress(seconds_between_lines=1e6))
    assert [line.split("  ")[0] for line in lines(capsys.readouterr().out)] == ["iteration 1/4", "iteration 4/4"]


def test_a_resumed_run_counts_on(make_trainer, make_data, capsys, tmp_path):
    trainer = fit(make_trainer, make_data(iterations=2), IterationProgress(0))
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    capsys.readouterr()
    fit(make_trainer, make_data(iterations=4), IterationProgress(0), ckpt_path=tmp_path / "x.ckpt")
    assert [line.split("  ")[0] for line in lines(capsys.readouterr().out)] == ["iteration 3/4", "iteration 4/4"]


def broken_off(make_trainer, data, path):
    """A checkpoint of the first iteration of a run that does not get further."""

    class Stop(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 1:
                trainer.save_checkpoint(path)
                raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        make_trainer(RewardScoring({"mean": MeanPixel()}), Stop()).fit(make_module(), datamodule=data)
    return path


def test_a_run_that_resumes_in_mid_epoch_counts_its_own_seconds(make_trainer, make_data, capsys, tmp_path):
    path = broken_off(make_trainer, make_data(iterations=3), tmp_path / "x.ckpt")
    start = time.perf_counter()
    fit(make_trainer, make_data(iterations=3), IterationProgress(0), ckpt_path=path)
    seconds = time.perf_counter() - start
    found = lines(capsys.readouterr().out)
    assert [line.split("  ")[0] for line in found] == ["iteration 2/3", "iteration 3/3"]
    assert all(float(re.search(r"(\S+) s/iteration", line)[1]) < seconds for line in found)


def test_on_a_terminal_a_resumed_bar_knows_its_total(make_trainer, make_data, monkeypatch, tmp_path):
    path = broken_off(make_trainer, make_data(iterations=3), tmp_path / "x.ckpt")
    monkeypatch.setattr(sys, "stdout", terminal := Terminal())
    fit(make_trainer, make_data(iterations=3), IterationProgress(), ckpt_path=path)
    assert "Training: 100%" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()


def test_on_a_terminal_the_bar_shows_reward_and_norm_and_no_version(make_trainer, make_data, monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    fit(make_trainer, make_data(iterations=2), IterationProgress())
    shown = terminal.getvalue()
    assert "Training: 100%" in shown
    assert "2/2" in shown
    assert re.search(r"reward=0\.\d+", shown)
    assert "grad_norm=" in shown
    assert "v_num" not in shown
    assert not lines(shown)


def test_time_left():
    assert [_clock(s) for s in (0.4, 61, 3599.6, 3723)] == ["0:00", "1:01", "1:00:00", "1:02:03"]


def test_the_interval_is_checked():
    with pytest.raises(ValueError, match="seconds_between_lines=-1"):
        IterationProgress(-1)

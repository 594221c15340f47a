"""The progress bar: iterations, seconds each, reward and gradient norm; plain lines where there is no terminal."""

from __future__ import annotations

import sys
import time
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm, convert_inf

from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.types import PromptBatch


def say(text: str) -> None:
    """Print a line, above the bar if one is on the screen; of several ranks the first one does."""
    if rank_zero_only.rank:
        return
    Tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


class IterationProgress(TQDMProgressBar):
    """A bar on a terminal; elsewhere (a file, a notebook, CI) a line of text now and then instead of control characters.

    Args:
        seconds_between_lines: least time between two lines without a terminal. The first and the last iteration always
            have one.
    """

    BAR_FORMAT = "{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}, {rate_fmt}{postfix}]"

    def __init__(self, seconds_between_lines: float = 10.0) -> None:
        super().__init__()
        if not seconds_between_lines >= 0:
            raise ValueError(f"seconds_between_lines={seconds_between_lines}: give a time of at least 0 seconds")
        self.seconds_between_lines = seconds_between_lines
        self._first: int | None = None
        """Iterations done before this session's first; unknown until that begins."""
        self._start = self._last_line = 0.0

    @property
    def is_enabled(self) -> bool:
        """Whether bars are drawn. (Lightning switches a bar off on other ranks than the first.)"""
        return super().is_enabled and _on_terminal()

    def init_train_tqdm(self) -> Tqdm:
        bar = super().init_train_tqdm()
        bar.unit = "iteration"
        return bar

    def on_train_start(self, *_: Any) -> None:
        super().on_train_start()
        self._first = None

    def on_train_epoch_start(self, *_: Any) -> None:
        """Nothing: Lightning skips it in a run that resumes in mid-epoch. The first iteration sets up."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LeanGRPO, batch: PromptBatch, batch_idx: int) -> None:
        """Count from where a resumed run begins, so that the seconds per iteration are this session's."""
        if self._first is not None:
            return
        self._first, bar = batch_idx, self.train_progress_bar
        bar.reset()
        bar.total = convert_inf(self.total_train_batches)
        bar.n = bar.initial = self._first
        bar.set_description("Training")
        self._start, self._last_line = time.perf_counter(), -float("inf")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        if self._enabled and not _on_terminal():
            self._line(trainer, pl_module, batch_idx + 1)

    def get_metrics(self, trainer: Trainer, pl_module: LeanGRPO) -> dict[str, Any]:
        """What the module logs for the bar, as short text; no version number."""
        metrics = super().get_metrics(trainer, pl_module)
        return {k: f"{v:.3g}" if isinstance(v, float) else v for k, v in metrics.items() if k != "v_num"}

    def _line(self, trainer: Trainer, pl_module: LeanGRPO, done: int) -> None:
        now, total = time.perf_counter(), self.total_train_batches
        assert self._first is not None
        if done not in (self._first + 1, total) and now - self._last_line < self.seconds_between_lines:
            return
        self._last_line = now
        each = (now - self._start) / (done - self._first)
        values = "".join(f"  {name} {value}" for name, value in self.get_metrics(trainer, pl_module).items())
        left = _clock(each * (total - done)) if total < float("inf") else "?"
        print(f"iteration {done}/{total}{values}  {each:.2f} s/iteration  {left} left", flush=True)


def _on_terminal() -> bool:
    return sys.stdout is not None and sys.stdout.isatty()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"

"""The checkpoint that an evaluation liked best."""

from __future__ import annotations

import json
import math
import shutil
import warnings
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from callbacks.checkpoint import IterationCheckpoint
from callbacks.progress import say
from callbacks.run_folder import replacing, run_folder, write_json
from lightning_modules.lean_grpo import LeanGRPO

FILE, RECORD = "best.ckpt", "best.json"


class BestCheckpoint(Checkpoint):
    """Keeps ``<run>/checkpoints/best.ckpt``, a whole checkpoint of the iteration at which a metric was best, and beside it
    ``best.json`` with ``metric``, ``value`` and ``iteration``. Of equal values the earliest is kept.

    The metric is looked for whenever an iteration ends, in what was measured at this iteration: ``eval/<name>`` of a
    benchmark, ``val/<reward>`` or ``held_out/<reward>`` of the held-out evaluation, or a training metric. What is evaluated
    before training counts as well: no checkpoint is better than the untrained policy unless it beats it.
    A resumed run goes on from the best of the run it resumes, whose file it copies.

    Args:
        metric: its name in the log.
        mode: ``max``: larger is better.

    Errors: ``ValueError`` on an unknown mode, and if it is listed after ``IterationCheckpoint``, whose checkpoints would then
    not know of the newest best.
    """

    def __init__(self, metric: str, mode: Literal["max", "min"] = "max") -> None:
        if mode not in ("max", "min"):
            raise ValueError(f"mode={mode!r}: choose max or min")
        self.metric, self.mode = metric, mode
        self.value: float | None = None
        """The best so far."""
        self.iteration: int | None = None
        """At which it was measured."""
        self.path: Path | None = None
        """Of the best checkpoint; ``None``: there is none, or the policy was best before training."""
        self._found = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        callbacks: list[Any] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
        before = callbacks[: callbacks.index(self)]
        if any(isinstance(callback, IterationCheckpoint) for callback in before):
            raise ValueError(
                "list BestCheckpoint before IterationCheckpoint, whose checkpoints keep what is best so far"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._found = self.value is not None
        if self.path is not None:
            self._adopt(trainer)
        self._look(trainer, pl_module, save=pl_module.iteration > 0)  # a resumed run may make up for an evaluation

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._look(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._look(trainer, pl_module)
        if not self._found:
            warnings.warn(
                f"no checkpoint is the best by {self.metric!r}, which was never measured; in the last iteration there were "
                f"{', '.join(sorted(pl_module.iteration_metrics))}",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "metric": self.metric, "value": self.value, "iteration": self.iteration,
            "path": None if self.path is None else str(self.path.absolute()),
        }  # fmt: skip

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if state_dict["metric"] == self.metric:
            self.value, self.iteration = state_dict["value"], state_dict["iteration"]
            self.path = None if state_dict["path"] is None else Path(state_dict["path"])

    def _look(self, trainer: Trainer, pl_module: LeanGRPO, save: bool = True) -> None:
        value = pl_module.iteration_metrics.get(self.metric)
        if value is None or not math.isfinite(value) or pl_module.iteration == self.iteration:
            return
        self._found = True
        if self.value is not None and (value <= self.value if self.mode == "max" else value >= self.value):
            return
        self.value, self.iteration = value, pl_module.iteration
        self.path = run_folder(trainer) / "checkpoints" / FILE if save else None
        if self.path is not None:
            what = f"the best checkpoint, of iteration {self.iteration}"
            pl_module.ranks.share(lambda: self._write(trainer), what)
            say(f"best {self.metric} so far: {value:.4g} at iteration {self.iteration} ({self.path})")

    def _write(self, trainer: Trainer) -> None:
        """Every rank's part. (``trainer.save_checkpoint`` would wait without end for a rank that failed.)"""
        assert self.path is not None
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        trainer.strategy.save_checkpoint(checkpoint, self.path)
        if trainer.is_global_zero:
            write_json(self.path.with_name(RECORD), self._record)

    @property
    def _record(self) -> dict[str, Any]:
        return {"metric": self.metric, "value": self.value, "iteration": self.iteration}

    def _adopt(self, trainer: Trainer) -> None:
        """Copy the best checkpoint of the run that is resumed, if it still is the one that was best then."""
        assert self.path is not None
        mine = run_folder(trainer) / "checkpoints" / FILE
        if _read_record(self.path.with_name(RECORD)) != self._record or not self.path.exists():
            warnings.warn(
                f"{self.path} is gone, or the run went on and replaced it: the search for the best starts anew",
                stacklevel=2,
            )
            self.value = self.iteration = self.path = None
            return
        if mine.absolute() != self.path.absolute() and trainer.is_global_zero:
            _copy(self.path, mine)
            write_json(mine.with_name(RECORD), self._record)
        self.path = mine


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _copy(path: Path, to: Path) -> None:
    with replacing(to) as temporary:
        if path.is_dir():
            shutil.copytree(path, temporary)
        else:
            shutil.copyfile(path, temporary)

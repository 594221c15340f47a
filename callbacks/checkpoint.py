"""Checkpoints counted in iterations, also of a run that is broken off."""

from __future__ import annotations

import os
import shlex
import shutil
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint

from callbacks.run_folder import replacing, run_folder


class IterationCheckpoint(Checkpoint):
    """Writes ``<run>/checkpoints/iteration_000020.ckpt`` and keeps ``last.ckpt`` equal to the newest one.

    It counts the module's ``iteration`` (rollouts), not optimizer steps; saves every so many iterations, when training
    ends, and when it is broken off by any exception, Ctrl-C included: then the state as of the last completed iteration,
    with the command that resumes. Lightning calls it after all other callbacks.

    Args:
        every: iterations from one checkpoint to the next.
        keep: newest checkpoints to keep beside ``last.ckpt``; older ones are removed if this callback wrote them.
    """

    def __init__(self, every: int = 10, keep: int = 2) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value < 1:
                raise ValueError(f"{name}={value}: give an integer of at least 1")
        self.every, self.keep = every, keep
        self._written: list[Path] = []
        self._on_disk = 0
        self._training = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not hasattr(pl_module, "iteration"):
            raise ValueError(
                f"{type(pl_module).__name__} counts no iterations: use lightning.pytorch.callbacks.ModelCheckpoint for it"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._on_disk = _iteration(pl_module)  # none was completed, or they are in the checkpoint that was loaded
        self._training = True

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if _iteration(pl_module) % self.every == 0:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._training = False
        self._save(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if not self._training:
            return
        self._training = False
        cause = type(exception).__name__
        try:
            self._save(trainer, pl_module)
        except Exception as error:  # the exception that ended the run is the one to be seen
            print(f"\n{cause}: no checkpoint of iteration {_iteration(pl_module)}: {error}", flush=True)
        newest = str(self._last(trainer)) if self._written else trainer.ckpt_path
        if newest is None:
            print(f"\n{cause}: broken off before a checkpoint was written; there is nothing to resume", flush=True)
        else:
            print(
                f"\n{cause}: broken off after iteration {self._on_disk}. Resume with\n  {_command(trainer, newest)}",
                flush=True,
            )

    def _save(self, trainer: Trainer, pl_module: LightningModule) -> None:
        iteration = _iteration(pl_module)
        if iteration == self._on_disk:
            return
        last = self._last(trainer)
        path = last.with_name(f"iteration_{iteration:06d}.ckpt")
        trainer.save_checkpoint(path, weights_only=False)
        self._written.append(path)
        self._on_disk = iteration
        if trainer.is_global_zero:
            _point(last, path)
            for old in self._written[: -self.keep]:
                old.unlink(missing_ok=True)
        del self._written[: -self.keep]

    @staticmethod
    def _last(trainer: Trainer) -> Path:
        return run_folder(trainer) / "checkpoints" / "last.ckpt"


def _iteration(pl_module: LightningModule) -> int:
    return int(pl_module.iteration)  # pyright: ignore[reportArgumentType]


def _point(last: Path, path: Path) -> None:
    """Make ``last`` another name of the file ``path``, or a copy where the file system has no hard links."""
    with replacing(last) as temporary:
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)


def _command(trainer: Trainer, checkpoint: str | Path) -> str:
    """What to type to go on: the command line's own config if this run saved one."""
    config = run_folder(trainer) / "config.yaml"
    if config.is_file():
        return shlex.join(["python", "train.py", "fit", "--config", str(config), "--ckpt_path", str(checkpoint)])
    return f"trainer.fit(model, datamodule=data, ckpt_path={str(checkpoint)!r})"

"""Checkpoints counted in iterations, also of a run that is broken off."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint

from callbacks.run_folder import replacing, run_folder
from callbacks.stop_request import StopRequest, stop
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.parallel.checkpoints import is_sharded
from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.sequence import sequence_numbers

CLUSTER = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name)]
"""What clusters send before they take a job's machines away."""


class IterationCheckpoint(Checkpoint):
    """Writes ``<run>/checkpoints/iteration_000020.ckpt`` and keeps ``last.ckpt`` equal to the newest one.

    It counts the module's ``iteration`` (rollouts), not optimizer steps; saves every so many iterations and when training
    ends. Lightning calls it after all other callbacks. A run that is broken off:

    * by SIGTERM, SIGUSR1 or, with several ranks, Ctrl-C: all ranks complete the iteration, save it and stop; the status is
      the shell's for the signal (143 for SIGTERM);
    * by an exception, on a single process Ctrl-C included: the first rank saves the state as of the last completed
      iteration. Sharded weights need all ranks: they are saved if all of them failed at the same point, as they do where a
      reward fails on one; else the newest periodic checkpoint is what there is.

    The command that resumes is printed.

    Args:
        every: iterations from one checkpoint to the next.
        keep: newest checkpoints to keep beside ``last.ckpt``; older ones are removed if this callback wrote them.
    """

    grace = 60.0
    """Seconds that ranks wait for each other after an exception."""

    def __init__(self, every: int = 10, keep: int = 2) -> None:
        for name, value in (("every", every), ("keep", keep)):
            if value < 1:
                raise ValueError(f"{name}={value}: give an integer of at least 1")
        self.every, self.keep = every, keep
        self._request = StopRequest([])
        self._last_words = Ranks.alone()
        self._written: list[Path] = []
        self._on_disk = 0
        self._training = False

    def setup(self, trainer: Trainer, pl_module: LeanGRPO, stage: str) -> None:
        if stage == "fit" and not hasattr(pl_module, "iteration"):
            raise ValueError(
                f"{type(pl_module).__name__} counts no iterations: use lightning.pytorch.callbacks.ModelCheckpoint for it"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._on_disk = pl_module.iteration  # none was completed, or they are in the checkpoint that was loaded
        self._training = True
        alone = pl_module.ranks.size == 1
        self._request = StopRequest(CLUSTER if alone else [*CLUSTER, signal.SIGINT])
        self._request.listen()
        self._last_words = Ranks.alone() if alone else Ranks.connected(self.grace)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LeanGRPO, batch: Any, batch_idx: int) -> None:
        """Where ranks last meet before they wait for each other's layers: one that is gone is found out here."""
        request = max(pl_module.ranks.gather(self._request.received, f"the start of iteration {pl_module.iteration}"))
        if request:
            self._save(trainer, pl_module)
            stop(request)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.iteration % self.every == 0:
            self._save(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._training = False
        self._save(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LeanGRPO, exception: BaseException) -> None:
        if not self._training:
            return
        self._training = False
        cause = type(exception).__name__
        try:
            self._save_what_is_left(trainer, pl_module)
        except Exception as error:  # the exception that ended the run is the one to be seen
            print(f"\n{cause}: no checkpoint of iteration {pl_module.iteration}: {error}", flush=True)
        if not trainer.is_global_zero:
            print(f"\nrank {trainer.global_rank} stops: {cause}: {exception}", flush=True)
            return
        newest = str(self._last(trainer)) if self._written else trainer.ckpt_path
        if newest is None:
            print(f"\n{cause}: broken off before a checkpoint was written; there is nothing to resume", flush=True)
        else:
            print(
                f"\n{cause}: broken off after iteration {self._on_disk}. Resume with\n  {_command(trainer, newest)}",
                flush=True,
            )

    def teardown(self, trainer: Trainer, pl_module: LeanGRPO, stage: str) -> None:
        self._last_words.close()
        self._last_words = Ranks.alone()

    def _save(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        """Together with the other ranks; where one cannot write, all say so."""
        if pl_module.iteration != self._on_disk:
            what = f"the checkpoint of iteration {pl_module.iteration}"
            pl_module.ranks.share(lambda: self._write(trainer, pl_module.iteration), what)

    def _save_what_is_left(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        """After an exception, when other ranks may be anywhere. Errors: ``RuntimeError`` if no checkpoint can be had."""
        if pl_module.iteration == self._on_disk:
            return
        together = is_sharded(pl_module)
        if together:
            here = (pl_module.iteration, pl_module.in_update, sequence_numbers())
            if len(set(self._last_words.gather(here, "the checkpoint after an exception"))) > 1:
                raise RuntimeError("weights are sharded, and the ranks failed at different points")
        try:
            if together or trainer.is_global_zero:
                self._write(trainer, pl_module.iteration)
        finally:
            with suppress(RuntimeError):  # until it is written: a launcher kills all processes once one has ended
                self._last_words.gather(None, "the end of the checkpoint after an exception")

    def _write(self, trainer: Trainer, iteration: int) -> None:
        """What ``trainer.save_checkpoint`` does but for its barrier at the end, at which ranks would wait for one that could
        not write."""
        last = self._last(trainer)
        path = last.with_name(f"iteration_{iteration:06d}.ckpt")
        trainer.strategy.save_checkpoint(trainer._checkpoint_connector.dump_checkpoint(weights_only=False), path)
        if trainer.is_global_zero:
            _point(last, path)
            for old in [*self._written, path][: -self.keep]:
                _remove(old)
        self._written = [*self._written, path][-self.keep :]
        self._on_disk = iteration

    @staticmethod
    def _last(trainer: Trainer) -> Path:
        return run_folder(trainer) / "checkpoints" / "last.ckpt"


def _point(last: Path, path: Path) -> None:
    """Make ``last`` another name of ``path``: of a file a hard link or, where the file system has none, a copy; of a folder
    a symbolic link."""
    with replacing(last) as temporary:
        if path.is_dir():
            temporary.symlink_to(path.name, target_is_directory=True)
            return
        try:
            os.link(path, temporary)
        except OSError:
            shutil.copyfile(path, temporary)


def _remove(path: Path) -> None:
    """A folder loses its name first, so that nothing incomplete is ever found under it."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path.with_name(f".{path.name}.removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.replace(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _command(trainer: Trainer, checkpoint: str | Path) -> str:
    """What to type to go on: the command line's own config if this run saved one."""
    config = run_folder(trainer) / "config.yaml"
    if config.is_file():
        return shlex.join(["python", "train.py", "fit", "--config", str(config), "--ckpt_path", str(checkpoint)])
    return f"trainer.fit(model, datamodule=data, ckpt_path={str(checkpoint)!r})"

"""The folder a run writes to, and how files get there: under their final name only once they are complete."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


class RunFolder(Callback):
    """Gives a run a folder of its own, ``<root>/version_<n>``, for all it writes. The first process chooses it once all are
    connected, however they were launched, and tells the others. List it first: it sets the Trainer's
    ``default_root_dir`` and loggers.

    Args:
        root: where run folders lie.
        loggers: log metrics to a CSV file and TensorBoard in the folder.

    Errors: ``ValueError`` on every rank where nothing can be written.
    """

    def __init__(self, root: Path, loggers: bool = True) -> None:
        self.root, self.loggers = root, loggers
        self.folder: Path | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.folder is None:
            self.folder = self._choose(trainer)
        trainer._default_root_dir = str(self.folder)  # pyright: ignore[reportAttributeAccessIssue]
        if self.loggers:
            self.loggers = False  # once, also where one Trainer fits and then tests
            trainer.loggers = [
                CSVLogger(self.folder, name="", version="", flush_logs_every_n_steps=1),
                TensorBoardLogger(self.folder, name="", version="", default_hp_metric=False, flush_secs=10),
            ]
            for logger in trainer.loggers:
                _ = logger.experiment  # pyright: ignore[reportAttributeAccessIssue]  (makes its files, as the Trainer does)

    def _choose(self, trainer: Trainer) -> Path:
        folder = error = None
        if trainer.is_global_zero:
            try:
                folder = new_run_folder(self.root)
                print(f"run folder: {folder}", flush=True)
            except ValueError as refused:
                error = str(refused)
        folder, error = trainer.strategy.broadcast((folder, error))
        if folder is None:
            raise ValueError(error)
        return folder


def new_run_folder(root: Path) -> Path:
    """Make ``root/version_<n>`` with the first n that no run has taken; safe against runs that start together. Errors:
    ``ValueError`` where nothing can be written."""
    try:
        root.mkdir(parents=True, exist_ok=True)
        taken = [int(match[1]) for path in root.iterdir() if (match := re.fullmatch(r"version_(\d+)", path.name))]
        return next(filter(_make, (root / f"version_{n}" for n in itertools.count(max(taken, default=-1) + 1))))
    except OSError as error:
        raise ValueError(
            f"trainer.default_root_dir={str(root)!r}: {error}; give a folder that can be written"
        ) from error


def _make(folder: Path) -> bool:
    """Whether the folder was not there and now is."""
    try:
        folder.mkdir()
    except FileExistsError:
        return False
    return True


def run_folder(trainer: Trainer) -> Path:
    """The log folder of the first logger that has one (TensorBoard's and CSV's), else ``trainer.default_root_dir``."""
    folders = (getattr(logger, "log_dir", None) for logger in trainer.loggers)
    return Path(next(filter(None, folders), trainer.default_root_dir))


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file in the same folder (made if missing) that becomes ``path`` when the block ends well, and is
    removed when it does not. It keeps the suffix, by which writers choose a format."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` atomically as JSON that every reader accepts: what is not finite becomes null."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(finite(content), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def finite(content: Any) -> Any:
    """The same nest of dicts and lists with None in place of NaN and infinities, for which JSON has no word."""
    if isinstance(content, Mapping):
        return {str(key): finite(value) for key, value in content.items()}
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content

"""Checkpoint files that are either whole or absent, and a plain word about those that are not ours.

A checkpoint is written to a temporary file in the same folder, brought to the disk, and only then given its name: a full
disk or a kill leaves the previous file of that name as it was.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from callbacks.run_folder import replacing
from lightning_modules.parallel.checkpoints import TREE, read_shards


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's way to files, made safe: ``Trainer(plugins=[AtomicCheckpointIO()])``. ``train.py`` installs it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write ``checkpoint`` to ``path``, replacing what is there at the end. Errors: whatever the writing raises, with
        a note; ``path`` is then as before and no temporary file is left."""
        if storage_options is not None:
            raise ValueError(f"storage_options={storage_options!r}: checkpoints are local files and take none")
        path = Path(path)
        _remove_half_written(path)
        try:
            with replacing(path) as temporary, open(temporary, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
        except Exception as error:
            error.add_note(
                f"checkpoint {path} was not written; an earlier file of that name is untouched. Is the disk full?"
            )
            raise
        _sync_folder(path.parent)

    def load_checkpoint(
        self, path: str | Path, map_location: Any = "cpu", weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, also one that FSDP2 wrote as a folder of shards; by default nothing but tensors and plain
        values, so that a file cannot run code. Of a file, tensors are read when they are used, through the page cache:
        the processes of a node do not each need room for all of it.

        Errors: ``ValueError`` naming the path and the remedy for a missing, truncated or foreign file.
        """
        check_is_checkpoint(path)
        try:
            if Path(path).is_dir():
                checkpoint = read_shards(Path(path), device=map_location)
            else:
                checkpoint = torch.load(
                    path, map_location=map_location, weights_only=weights_only is not False, mmap=map_location == "cpu"
                )
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise ValueError(
                f"{path} is no readable checkpoint: it is truncated, or another program's ({reason}); "
                "give another checkpoint of the same run"
            ) from None
        if not isinstance(checkpoint, dict) or not {"state_dict", "loops"} <= checkpoint.keys():
            raise ValueError(f"{path} holds no training state: give a checkpoint from a run's checkpoints/ folder")
        return checkpoint


def check_is_checkpoint(path: str | Path) -> None:
    """``ValueError`` unless ``path`` is a file, or a folder of shards; it names the checkpoints that lie in the same
    folder."""
    path = Path(path)
    if path.is_file() or (path / TREE).is_file():
        return
    near = sorted(str(file) for file in path.parent.glob("*.ckpt"))
    raise ValueError(
        f"there is no checkpoint {path}; " + (f"beside it: {', '.join(near)}" if near else "check the path")
    )


def _remove_half_written(path: Path) -> None:
    """Remove what a killed process left in the folder; a folder belongs to one run."""
    for file in path.parent.glob(f".*.[0-9]*{path.suffix}"):
        file.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Bring the new name itself to the disk, where the system can (Windows cannot open a folder)."""
    if os.name == "posix":
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

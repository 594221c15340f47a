"""A disk that hangs in the middle of a checkpoint, for tests that kill the process which writes it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from callbacks.checkpoint_io import AtomicCheckpointIO


class HangingDisk(AtomicCheckpointIO):
    """From iteration ``at`` on, half of a checkpoint is written; ``<folder>/half_written`` then tells that it hangs."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        whole = torch.save

        def half(content: Any, file: Any) -> None:
            whole(content, file)
            file.truncate(file.tell() // 2)
            (Path(path).parent / "half_written").touch()
            time.sleep(600)

        if checkpoint["lean_grpo"]["iteration"] >= self.at:
            torch.save = half
        try:
            super().save_checkpoint(checkpoint, path, storage_options)
        finally:
            torch.save = whole

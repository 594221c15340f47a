"""The folder a run writes to, and how files get there: under their final name only once they are complete."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer


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

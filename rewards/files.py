"""Weight files of rewards: found locally or through the hub's cache, read without running code, and named by checksum.

A *source* is what a user writes into a config: a local file, a local folder, or a hub id such as ``xswu/HPSv2``. Whatever
is wrong with one is a single ``ValueError`` with the place looked at and the command that gets the file.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

_FILE_SUFFIXES = {".pt", ".pth", ".bin", ".safetensors", ".json"}


def find_file(source: str, name: str, *, what: str, revision: str | None = None, get: str | None = None) -> Path:
    """The file ``name`` of ``source``; a ``source`` that is a file itself is that file, whatever its name.

    Args:
        source: local file, local folder or hub id.
        name: of the file in a folder or hub repository.
        what: names the file in messages, for instance "HPSv2 v2.1 weights".
        revision: of the hub repository.
        get: the command that gets the file, for messages; by default ``hf download`` where ``source`` is a hub id.

    Errors: ``ValueError`` with the path looked for and the command to get the file.
    """
    local = Path(source).expanduser()
    if local.is_file():
        return local
    if (local / name).is_file():
        return local / name
    if local.is_dir() or not _is_hub_id(source):
        raise ValueError(
            f"{what}: no {local / name if local.is_dir() else local}; give the path of the file, of a folder that holds "
            f"{name}, or a hub id{f'. To get it: {get}' if get else ''}"
        )
    from huggingface_hub import hf_hub_download

    get = get or f"hf download {source} {name}"
    return Path(_from_hub(lambda: hf_hub_download(source, name, revision=revision), f"{what}: no {name}", source, get))


def find_folder(source: str, patterns: Sequence[str], *, what: str, revision: str | None = None) -> Path:
    """A folder with the files of ``source`` that match ``patterns``: ``source`` itself where it is a local folder, which
    is not looked into, else the hub's snapshot. Errors: ``ValueError`` as of :func:`find_file`."""
    local = Path(source).expanduser()
    if local.is_dir():
        return local
    if not _is_hub_id(source):
        raise ValueError(
            f"{what}: no folder {local}; give the path of a folder with {', '.join(patterns)}, or a hub id"
        )
    from huggingface_hub import snapshot_download

    def download() -> str:
        return snapshot_download(source, revision=revision, allow_patterns=list(patterns))

    return Path(_from_hub(download, f"{what}: no {', '.join(patterns)}", source, download_command(source, patterns)))


def download_command(source: str, patterns: Sequence[str]) -> str:
    """The command that brings the files of a hub repository that match ``patterns`` into the hub's cache."""
    return " ".join([f"hf download {source}", *(f"--include '{pattern}'" for pattern in patterns)])


def read_weights(file: Path) -> dict[str, Any]:
    """A state dict, on the CPU: ``.safetensors``, or a pickle of tensors alone. Errors: ``ValueError`` on a file that is
    truncated or holds anything but plain values and tensors."""
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # pickle, zip and safetensors raise classes of their own
        raise ValueError(
            f"cannot read weights from {file} ({first_line(error)}): it is truncated or no file of tensors; get it again"
        ) from error


def fill(network: nn.Module, weights: dict[str, Any], *, file: Path, what: str) -> None:
    """Load ``weights``, read from ``file``, into ``network``. Errors: ``ValueError`` unless every name and shape fits."""
    try:
        network.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"{what}: the weights in {file} are of another network ({reason})") from error


def checksum(file: Path) -> str:
    """SHA-256 of a file, in hexadecimal; computed once per file as long as its size and time stay the same."""
    state = file.stat()
    return _sha256(file.resolve(), state.st_size, state.st_mtime_ns)


def first_line(error: Exception) -> str:
    """``class: message`` in one line of at most 200 characters."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"


@lru_cache
def _sha256(file: Path, size: int, time: int) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _is_hub_id(source: str) -> bool:
    """``owner/name``, and not the relative path of a weight file."""
    return bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", source)) and Path(source).suffix not in _FILE_SUFFIXES


def _from_hub(download: Callable[[], str], missing: str, source: str, get: str) -> str:
    from huggingface_hub.constants import HF_HUB_CACHE

    try:
        return download()
    except Exception as error:  # the hub's client raises its own classes, OSError and ValueError alike
        raise ValueError(
            f"{missing} of {source} in {HF_HUB_CACHE}, nor could it be fetched ({type(error).__name__}); on a machine with "
            f"network run `{get}`, or give the path of a local copy"
        ) from error

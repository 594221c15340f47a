"""Text embeddings on disk, one safetensors file per prompt, shared by runs and processes.

A file's name is a hash of everything the embedding depends on, and the file repeats it in plain text, so that a stale or
foreign entry is never used. Files appear whole: they are written beside their place and renamed into it. What cannot be
read is made again, and what cannot be written (a full disk, another user's folder) is made again next time.
"""

from __future__ import annotations

import hashlib
import os
import uuid
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

Embeddings = dict[str, Tensor]
"""name -> ``[N, ...]``, one row per prompt."""


class EmbeddingCache:
    """A folder of embeddings.

    Args:
        folder: made if it is not there. Several processes may use it at once.
        identity: what the embeddings depend on beside the prompt: model, revision, dtype, length.

    Errors: ``ValueError`` if the folder is not there and cannot be made.
    """

    def __init__(self, folder: str | Path, identity: str) -> None:
        self.folder, self.identity = Path(folder), identity
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"embedding_cache={self.folder} cannot be made ({error.strerror}): give a folder that can be written to, or "
                "null to encode every time"
            ) from error

    def __call__(self, prompts: Sequence[str], embed: Callable[[list[str]], Embeddings]) -> Embeddings:
        """Embeddings of ``prompts``, at least one, on the CPU; those not on disk are made by one call of ``embed`` and stored."""
        rows = {prompt: row for prompt in dict.fromkeys(prompts) if (row := self._read(prompt)) is not None}
        missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in rows]
        if missing:
            made = embed(missing)
            for n, prompt in enumerate(missing):
                rows[prompt] = {name: t[n].detach().cpu().clone() for name, t in made.items()}
                self._write(prompt, rows[prompt])
        return {name: torch.stack([rows[prompt][name] for prompt in prompts]) for name in rows[prompts[0]]}

    def path(self, prompt: str) -> Path:
        """Where the embedding of ``prompt`` lies or would lie."""
        key = f"{self.identity}\0{prompt}".encode()
        return self.folder / f"{hashlib.blake2b(key, digest_size=20).hexdigest()}.safetensors"

    def _read(self, prompt: str) -> Embeddings | None:
        path = self.path(prompt)
        if not path.exists():
            return None
        try:
            with safe_open(path, framework="pt") as file:
                if file.metadata() != self._header(prompt):
                    raise SafetensorError("it belongs to another prompt or model")
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
        except (SafetensorError, OSError) as error:
            warnings.warn(f"text embedding {path} cannot be used ({error}); it is made again", stacklevel=2)
            return None

    def _write(self, prompt: str, row: Embeddings) -> None:
        path = self.path(prompt)
        draft = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
        try:
            draft.write_bytes(save(row, metadata=self._header(prompt)))
            os.replace(draft, path)
        except OSError as error:
            warnings.warn(f"text embeddings cannot be kept in {self.folder} ({error.strerror})", stacklevel=2)
        finally:
            draft.unlink(missing_ok=True)

    def _header(self, prompt: str) -> dict[str, str]:
        return {"identity": self.identity, "prompt": prompt}

"""Noise as a pure function of its place in the run, instead of the state of a generator.

The noise of a row depends on (seed, iteration, prompt position, generation, step) and on nothing else: not on the other
rows of the batch, their order, the rank or the number of ranks, nor on whether the run was resumed.
"""

from __future__ import annotations

import hashlib
import operator

import torch
from torch import Tensor

from lightning_modules.types import Rows


def keyed_generator(*key: int | str) -> torch.Generator:
    """A CPU generator whose stream is determined by ``key`` alone, the same in every process.

    torch's CPU engine uses 32 bits of a seed, so two keys share a stream with probability 2^-32.
    """
    canonical = repr(tuple(part if isinstance(part, str) else operator.index(part) for part in key))
    digest = hashlib.blake2b(canonical.encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little"))


class KeyedNoise:
    """The noise of one batch of rows in one iteration.

    Args:
        seed: of the run.
        iteration: 0-based.
        rows: ids of the batch's rows, N of them.
        latent_shape: ``(C, H, W)`` or ``(C, F, H, W)``.
        same_initial: one ``x_T`` per prompt, shared by its group (DanceGRPO); the steps' noise still differs by member.
    """

    def __init__(
        self, *, seed: int, iteration: int, rows: Rows, latent_shape: tuple[int, ...], same_initial: bool = False
    ) -> None:
        self._run = (seed, iteration)
        self._rows = list(zip(rows.prompt.tolist(), rows.generation.tolist(), strict=True))
        self._latent_shape = latent_shape
        self._same_initial = same_initial

    def initial(self) -> Tensor:
        """The pure noise that the rollout starts from: ``[N, *latent]`` float32 on the CPU, standard normal."""
        keep = 1 if self._same_initial else 2
        return self._normal([("initial", *self._run, *row[:keep]) for row in self._rows])

    def __call__(self, step: int) -> Tensor:
        """The noise added by step ``step`` (0-based): ``[N, *latent]`` float32 on the CPU, standard normal."""
        return self._normal([("step", *self._run, *row, step) for row in self._rows])

    def _normal(self, keys: list[tuple[int | str, ...]]) -> Tensor:
        rows = [torch.randn(self._latent_shape, dtype=torch.float32, generator=keyed_generator(*key)) for key in keys]
        return torch.stack(rows) if rows else torch.empty(0, *self._latent_shape)

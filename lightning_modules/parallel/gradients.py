"""Local gradients: hold apart, scale, accumulate, hand to the optimizer. Single process; other layouts keep the
interface and add a reduction.

Order that must hold (LeanGRPO, arXiv 2609.03528, section 3): correction -> synchronisation -> accumulation -> clipping
-> optimizer step. Reweight therefore holds each sample's gradient apart until its advantage is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import Parameter


class Gradient:
    """A gradient held apart: one tensor per parameter, ``None`` where nothing flowed yet."""

    def __init__(self, size: int) -> None:
        self.tensors: list[Tensor | None] = [None] * size

    @torch.no_grad()
    def add_(self, other: Gradient, scale: float = 1.0) -> Gradient:
        """``self += scale * other``, accumulated in at least fp32 (a bf16 sum of many samples would lose them)."""
        for k, part in enumerate(other.tensors):
            if part is None:
                continue
            mine = self.tensors[k]
            if mine is None:
                wide = torch.promote_types(part.dtype, torch.float32)
                self.tensors[k] = part.to(wide, copy=True).mul_(scale)
            else:
                mine.add_(part, alpha=scale)
        return self

    @torch.no_grad()
    def mul_(self, scale: float) -> Gradient:
        for part in self.tensors:
            if part is not None:
                part.mul_(scale)
        return self

    def clear(self) -> None:
        self.tensors = [None] * len(self.tensors)

    @property
    def empty(self) -> bool:
        return all(part is None for part in self.tensors)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.tensors if part is not None)


class LocalGradients:
    """Where backward calls put their gradients, for a fixed list of trainable parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)

    def buffer(self) -> Gradient:
        return Gradient(len(self.parameters))

    @contextmanager
    def into(self, buffer: Gradient) -> Iterator[None]:
        """Backward calls inside accumulate into ``buffer`` (in the parameters' dtype) and leave ``.grad`` alone."""
        before = [p.grad for p in self.parameters]
        for p, part in zip(self.parameters, buffer.tensors, strict=True):
            p.grad = part
        try:
            yield
        finally:
            for k, p in enumerate(self.parameters):
                buffer.tensors[k], p.grad = p.grad, before[k]

    def deliver(self, total: Gradient) -> None:
        """Make ``total`` the parameters' ``.grad`` (cast to their dtype) and empty it."""
        for p, part in zip(self.parameters, total.tensors, strict=True):
            p.grad = None if part is None else part.to(p.dtype)
        total.clear()

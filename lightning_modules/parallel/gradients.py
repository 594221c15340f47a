"""Local gradients: hold apart, scale, accumulate, add up over the ranks, hand to the optimizer. Here for a single process;
where parameters are replicated or sharded over ranks, the interface is the same.

Order that must hold (LeanGRPO, arXiv 2609.03528, section 3): correction -> synchronisation -> accumulation -> clipping
-> optimizer step. Reweight therefore holds each sample's gradient apart until its advantage is known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

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


@dataclass
class Traffic:
    """What was communicated to add gradients up, on this rank."""

    reductions: int = 0
    """One = all trainable tensors once."""
    collectives: int = 0
    bytes: int = 0
    """Handed to collectives."""

    def sent(self, tensor: Tensor) -> None:
        self.collectives += 1
        self.bytes += tensor.nbytes


class LocalGradients:
    """Where backward calls put their gradients, for a fixed list of trainable parameters."""

    def __init__(self, parameters: Sequence[Parameter]) -> None:
        self.parameters = list(parameters)
        self.traffic = Traffic()

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

    def reduce(self, total: Gradient) -> Gradient:
        """The sum of every rank's ``total``, which is emptied. No average: losses are normalised by the numbers of the
        whole update. A parameter without a gradient on every rank has none in the sum either."""
        reduced = self.buffer()
        reduced.tensors, total.tensors = total.tensors, reduced.tensors
        return reduced

    def deliver(self, reduced: Gradient) -> None:
        """Make ``reduced`` the parameters' ``.grad`` (cast to their dtype) and empty it."""
        for p, part in zip(self.parameters, reduced.tensors, strict=True):
            p.grad = None if part is None else part.to(p.dtype)
        reduced.clear()

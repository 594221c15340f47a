"""Adding gradients up over the ranks, in buckets: parameters are laid side by side in one flat buffer, which one collective
sums. Whether a rank keeps all of the sum (replicated parameters) or its own shard (sharded ones) is the subclass's.

A bucket is ``[S, width]`` with one row per shard, ``S = 1`` where nothing is sharded. Sharding is along a parameter's first
dimension, in equal shares of ``ceil(n / S)`` rows of which the last ones may be short or empty, hence in runs of its flat
elements; what is short is padded with zeros.

Beside the gradient itself one bucket is alive at a time: what has been laid into it is let go before it is sent.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import Parameter

from lightning_modules.parallel.gradients import Gradient, LocalGradients
from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.tensors import local

BUCKET_BYTES = 128 * 2**20
"""Size of a bucket in fp32, where no single parameter is larger: enough for full bandwidth, little beside a model."""


class SummedGradients(LocalGradients):
    """Local gradients of several ranks.

    Args:
        parameters: the trainable ones, in the same order on every rank.
        ranks: who takes part.
        reduce_dtype: what is sent and added up; ``None``: the parameters' own, at least fp32. With bf16 (unit
            roundoff 2^-8) the sum of R terms is off by up to ``R 2^-8`` of the sum of their absolute values: the terms are
            rounded, then R - 1 partial sums.
        shards: S.
        device: what the collectives run on.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        ranks: Ranks,
        *,
        reduce_dtype: torch.dtype | None,
        shards: int,
        device: torch.device,
    ) -> None:
        super().__init__(parameters)
        self.ranks, self.reduce_dtype, self._shards, self._device = ranks, reduce_dtype, shards, device

    @torch.no_grad()
    def reduce(self, total: Gradient) -> Gradient:
        reduced = self.buffer()
        present = self._present_anywhere(total)
        for bucket in buckets(present, self.parameters):
            summed = self._add_up(self._packed(bucket, total)).to(_wide(self.parameters[bucket[0]]))
            for k, part in zip(bucket, summed.split(self._widths(bucket)), strict=True):
                shape = local(self.parameters[k]).shape
                reduced.tensors[k] = part[: shape.numel()].view(shape)
        self.traffic.reductions += bool(present)
        total.clear()
        return reduced

    @abstractmethod
    def _add_up(self, bucket: Tensor) -> Tensor:
        """``[S, width]`` of every rank -> this rank's part ``[width]`` of the sum."""

    def _present_anywhere(self, total: Gradient) -> list[int]:
        """The parameters for which some rank has a gradient: zeros in place of none would let weight decay and momentum
        move what nothing pulls at."""
        present = [part is not None for part in total.tensors]
        columns = zip(*self.ranks.gather(present, "the reduction of gradients"), strict=True)
        return [k for k, column in enumerate(columns) if any(column)]

    def _packed(self, bucket: Sequence[int], total: Gradient) -> Tensor:
        """What ``total`` holds of a bucket, and no longer does; zeros where this rank has nothing."""
        widths, start = self._widths(bucket), 0
        dtype = self.reduce_dtype or _wide(self.parameters[bucket[0]])
        flat = torch.zeros(self._shards, sum(widths), dtype=dtype, device=self._device)
        for k, width in zip(bucket, widths, strict=True):
            part, total.tensors[k] = total.tensors[k], None
            if part is not None:
                rows, columns = part.reshape(-1), flat[:, start : start + width]
                full = len(rows) // width
                columns[:full].copy_(rows[: full * width].view(full, width))
                if rest := len(rows) - full * width:
                    columns[full, :rest].copy_(rows[-rest:])
            start += width
        return flat

    def _widths(self, bucket: Sequence[int]) -> list[int]:
        """Elements of one shard of each parameter, padding included."""
        return [-(-_rows(p) // self._shards) * (p.numel() // _rows(p)) for p in (self.parameters[k] for k in bucket)]


def buckets(indices: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Consecutive ones of the parameters at ``indices``, of one dtype and up to :data:`BUCKET_BYTES` together."""
    bucket: list[int] = []
    size = 0
    for k in indices:
        bytes_ = 4 * parameters[k].numel()
        if bucket and (size + bytes_ > BUCKET_BYTES or parameters[k].dtype != parameters[bucket[0]].dtype):
            yield bucket
            bucket, size = [], 0
        bucket.append(k)
        size += bytes_
    if bucket:
        yield bucket


def _rows(parameter: Tensor) -> int:
    return parameter.shape[0] if parameter.ndim else 1


def _wide(parameter: Tensor) -> torch.dtype:
    return torch.promote_types(parameter.dtype, torch.float32)

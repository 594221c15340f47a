"""Gradients of parameters that every rank holds whole (DDP): one coalesced sum over the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_modules.parallel.gradients import Gradient, LocalGradients, zeros_like_gradient
from lightning_modules.parallel.ranks import Ranks

BUCKET_BYTES = 128 * 2**20
"""Size up to which tensors are put together into one collective: large enough for bandwidth, small beside the model."""


class ReplicatedGradients(LocalGradients):
    """Reduces by all-reduce.

    Args:
        parameters: the trainable ones, in the same order on every rank.
        ranks: who takes part.
        reduce_dtype: what is sent and added up; ``None``: as held, at least fp32. With bf16 each sum of R terms is off by
            up to ``R 2^-9`` of its largest term.
    """

    def __init__(self, parameters: Sequence[Parameter], ranks: Ranks, reduce_dtype: torch.dtype | None = None) -> None:
        super().__init__(parameters)
        self.ranks, self.reduce_dtype = ranks, reduce_dtype

    @torch.no_grad()
    def reduce(self, total: Gradient) -> Gradient:
        present = self.present_anywhere(total, self.ranks)
        reduced = self.buffer()
        for bucket in _buckets([k for k, here in enumerate(present) if here], self.parameters):
            parts = [zeros_like_gradient(total.tensors[k], self.parameters[k]) for k in bucket]
            for k in bucket:
                total.tensors[k] = None
            wide = torch.promote_types(parts[0].dtype, torch.float32)
            flat = torch.cat([part.flatten() for part in parts]).to(self.reduce_dtype or wide)
            dist.all_reduce(flat)
            self.traffic.sent(flat)
            for k, part in zip(bucket, flat.to(wide).split([part.numel() for part in parts]), strict=True):
                reduced.tensors[k] = part.view(self.parameters[k].shape)
        if any(present):
            self.traffic.reductions += 1
        total.clear()
        return reduced


def _buckets(indices: Sequence[int], parameters: Sequence[Tensor]) -> Iterator[list[int]]:
    """Consecutive parameters of one dtype, up to :data:`BUCKET_BYTES` together (in fp32)."""
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

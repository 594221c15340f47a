"""Gradients of parameters that every rank holds whole (DDP): summed by all-reduce."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.summed import SummedGradients


class ReplicatedGradients(SummedGradients):
    """Every rank gets the whole sum. Arguments as for :class:`SummedGradients`."""

    def __init__(self, parameters: Sequence[Parameter], ranks: Ranks, reduce_dtype: torch.dtype | None = None) -> None:
        super().__init__(parameters, ranks, reduce_dtype=reduce_dtype, shards=1, device=parameters[0].device)

    def _add_up(self, bucket: Tensor) -> Tensor:
        dist.all_reduce(bucket)
        self.traffic.sent(bucket)
        return bucket[0]

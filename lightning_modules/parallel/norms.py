"""The global gradient norm, and clipping by it, whether parameters are whole on every rank or sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import Parameter


@torch.no_grad()
def clip_grad_norm(parameters: Sequence[Parameter], bound: float) -> float:
    """L2 norm over all gradients, equal to that of the unsharded ones; where it exceeds ``bound`` (``inf``: never) the
    gradients are scaled down to it in place."""
    sharded = [p for p in parameters if isinstance(p.grad, DTensor)]
    plain = [p for p in parameters if p.grad is not None and not isinstance(p.grad, DTensor)]
    if not sharded:
        return torch.nn.utils.clip_grad_norm_(plain, bound).item()
    norms = [torch.nn.utils.get_total_norm([p.grad for p in part if p.grad is not None]) for part in (sharded, plain)]
    total = torch.linalg.vector_norm(torch.stack([_whole(norm) for norm in norms]))
    for part in (sharded, plain):
        torch.nn.utils.clip_grads_with_norm_(part, bound, total)
    return total.item()


def _whole(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm

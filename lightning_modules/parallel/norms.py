"""The global gradient norm, and clipping by it, whether parameters are whole on every rank or all of them sharded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import Parameter

from lightning_modules.parallel.tensors import whole


@torch.no_grad()
def clip_grad_norm(parameters: Sequence[Parameter], bound: float) -> float:
    """L2 norm over all gradients, equal to that of the unsharded ones; where it exceeds ``bound`` (``inf``: never) the
    gradients are scaled down to it in place."""
    norm = whole(torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None]))
    torch.nn.utils.clip_grads_with_norm_(parameters, bound, norm)
    return norm.item()

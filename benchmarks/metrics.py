"""How far a vector lies from a reference (LeanGRPO, arXiv 2609.03528, Tables 2-4), over all trainable parameters
flattened, in float64:

    Cos = x . y / (|x| |y|),    RelL2 = |x - y| / |x|,    MaxAbs = max |x - y|,    x the reference.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Distance:
    """Distance of ``y`` from the reference ``x``."""

    cosine: float
    relative_l2: float
    max_abs: float


def distance(x: Tensor, y: Tensor) -> Distance:
    """``x [n]`` reference, ``y [n]``. Errors: ``ValueError`` where there is nothing to compare with."""
    if x.shape != y.shape:
        raise ValueError(f"vectors of {tuple(x.shape)} and {tuple(y.shape)}: compare the same parameters")
    x, y = x.double(), y.double()
    size = x.norm().item()
    if not (size > 0 and size < float("inf")):
        raise ValueError(f"the reference vector has norm {size}: nothing to compare with (are all rewards equal?)")
    apart = x - y
    return Distance(
        cosine=(x @ y / (size * y.norm())).item() if y.any() else 0.0,
        relative_l2=apart.norm().item() / size,
        max_abs=apart.abs().max().item(),
    )


def flatten(tensors: Iterable[Tensor]) -> Tensor:
    """Tensors of any shapes -> one float64 copy ``[n]``."""
    return torch.cat([t.detach().double().flatten() for t in tensors])

"""A smooth, deterministic reward of the image alone, for sanity checks: any correct trainer raises it at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rewards.base import Reward


class Brightness(Reward):
    """``-|m - target|^2`` with ``m`` the image's mean RGB: at most 0, quadratic in the pixels.

    Args:
        target: wanted mean RGB, each in [0, 1]; the default asks for a darker image than most.
    """

    reads = "image"

    def __init__(self, target: tuple[float, float, float] = (0.5, 0.5, 0.5)) -> None:
        if len(target) != 3 or not all(0.0 <= value <= 1.0 for value in target):
            raise ValueError(f"target {target!r}: expected a mean colour, three numbers in [0, 1]")
        self.target = torch.tensor(tuple(target), dtype=torch.float64)

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"target": self.target.tolist()}

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """``images [N, 3, H, W]`` or ``[N, 3, F, H, W]``, float in [0, 1] -> scores [N] float64, on the CPU."""
        mean = images.flatten(2).double().mean(-1).cpu()
        return -(mean - self.target).square().sum(-1)

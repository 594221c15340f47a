"""What a reward is: finished images and their prompts in, one score per sample out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class Reward(ABC):
    """Frozen and without gradients. Deliberately no ``nn.Module``, so that it can never become a child of the
    LightningModule or part of its checkpoint; a reward that owns a network keeps it as a plain attribute."""

    @abstractmethod
    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """``images [N, 3, H, W]`` (or ``[N, 3, F, H, W]``) float in [0, 1] -> ``[N]`` scores, larger is better."""

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """Check the input, score it, check the output's length. Errors: ``ValueError`` on a wrong range, dtype or
        length; whatever :meth:`score` raises passes through."""
        check_images(images)
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} metadata entries: give one of each per sample"
            )
        scores = torch.as_tensor(self.score(images, prompts, metadata), dtype=torch.float64, device="cpu")
        if scores.shape != (len(images),):
            raise ValueError(
                f"{type(self).__name__} returned scores of shape {tuple(scores.shape)} for {len(images)} images; return one "
                "score per image"
            )
        return scores


def check_images(images: Tensor) -> None:
    """``ValueError`` unless ``images`` is float ``[N, 3, H, W]`` or ``[N, 3, F, H, W]`` with finite values in [0, 1]."""
    if images.ndim not in (4, 5) or images.shape[1] != 3:
        raise ValueError(f"images of shape {tuple(images.shape)}: expected [N, 3, H, W] or [N, 3, F, H, W]")
    if not images.is_floating_point():
        raise ValueError(f"images of dtype {images.dtype}: expected float in [0, 1]; divide uint8 by 255")
    if images.numel():
        low, high = images.amin().item(), images.amax().item()
        if not (low >= 0.0 and high <= 1.0):  # also catches NaN
            raise ValueError(f"images span [{low:.4g}, {high:.4g}]: expected [0, 1] (decode before scoring)")

"""Images in the forms that people and networks hold them.

Rewards take float ``[N, 3, H, W]`` in [0, 1]; the field's image rewards were trained and are published on 8-bit files. So
every reward here rounds to 8 bits first, as saving a PNG does: an image scores the same as tensor and as file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor

if TYPE_CHECKING:
    from rewards.base import Reward


def as_batch(images: Image | Sequence[Image] | Tensor) -> Tensor:
    """What rewards take, from what one has.

    Args:
        images: PIL images of one size (any mode; transparency is dropped), or a tensor ``[N, 3, H, W]`` or ``[3, H, W]``,
            uint8 or float in [0, 1].

    Returns:
        ``[N, 3, H, W]`` float in [0, 1]; uint8 values are divided by 255.

    Errors: ``ValueError`` on images of several sizes or another shape or dtype.
    """
    if not isinstance(images, Tensor):
        pictures = images if isinstance(images, Sequence) else [images]
        if len(sizes := {picture.size for picture in pictures}) != 1:
            raise ValueError(f"images of {len(sizes)} sizes {sorted(sizes)}: give at least one, all of the same size")
        images = torch.stack([_pixels(picture) for picture in pictures])
    if images.ndim == 3:
        images = images[None]
    if images.ndim != 4 or images.shape[1] != 3:
        raise ValueError(f"images of shape {tuple(images.shape)}: expected [N, 3, H, W] or [3, H, W]")
    if images.dtype == torch.uint8:
        return images.float() / 255
    if not images.is_floating_point():
        raise ValueError(f"images of dtype {images.dtype}: expected uint8, or float in [0, 1]")
    return images


def eight_bit(images: Tensor) -> Tensor:
    """Float in [0, 1], any shape -> uint8, rounded to nearest."""
    return images.float().mul(255).round().to(torch.uint8)


def as_pil(images: Tensor) -> list[Image]:
    """Float ``[N, 3, H, W]`` in [0, 1] -> N images of 8 bits per channel."""
    return [fromarray(image) for image in eight_bit(images).permute(0, 2, 3, 1).contiguous().cpu().numpy()]


def refuse_video(images: Tensor, reward: Reward) -> None:
    """``ValueError`` on videos ``[N, 3, F, H, W]``."""
    if images.ndim == 5:
        raise ValueError(
            f"{type(reward).__name__} scores images [N, 3, H, W], not videos of shape {tuple(images.shape)}: wrap it in "
            "FirstFrame, EveryNthFrame or MeanOverFrames of rewards/video.py"
        )


def _pixels(picture: Image) -> Tensor:
    """uint8 ``[3, H, W]``."""
    return torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)

"""JPEG size of an image (DDPO, Black et al. 2023, arXiv 2305.13301): a reward without a network that any correct trainer
raises within a few iterations, in either direction."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from rewards.base import Reward
from rewards.images import as_pil, refuse_video
from rewards.network import check_choice

if TYPE_CHECKING:
    from PIL.Image import Image

SIGNS = {"small": -1.0, "large": 1.0}


class Compressibility(Reward):
    """Plus or minus the image's size as a JPEG file, in kB (1,000 bytes).

    Args:
        prefer: "small" files (``-size``: DDPO's compressibility) or "large" ones (``+size``: its incompressibility).
        quality: of the JPEG, 1 to 95; DDPO and FlowGRPO take 95. (FlowGRPO also divides ``-size`` by 500: a weight.)

    Errors: ``ValueError`` on unusable arguments, and on videos.
    """

    reads = "image"

    def __init__(self, *, prefer: Literal["small", "large"] = "small", quality: int = 95) -> None:
        check_choice("prefer", prefer, SIGNS)
        if not 1 <= quality <= 95:
            raise ValueError(f"quality={quality}: expected 1 to 95")
        self.prefer, self.quality = prefer, quality

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"prefer": self.prefer, "quality": self.quality}

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """``images [N, 3, H, W]`` float in [0, 1] -> ``[N]`` kB, float64, on the CPU."""
        refuse_video(images, self)
        sizes = [jpeg_bytes(image, self.quality) / 1000 for image in as_pil(images)]
        return SIGNS[self.prefer] * torch.tensor(sizes, dtype=torch.float64)


def jpeg_bytes(image: Image, quality: int) -> int:
    """Size of the image's JPEG file, with PIL's other settings."""
    buffer = io.BytesIO()
    image.save(buffer, format="JPEG", quality=quality)
    return buffer.tell()

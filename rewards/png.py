"""Images as PNG files in memory. A value in [0, 1] is rounded to 8 bits, so it moves by at most 1 / 510."""

from __future__ import annotations

import base64
import io

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from rewards.images import as_pil


def encode_png(image: Tensor) -> bytes:
    """``[3, H, W]`` float in [0, 1] -> a PNG file."""
    stream = io.BytesIO()
    as_pil(image[None])[0].save(stream, format="PNG", compress_level=1)
    return stream.getvalue()


def decode_png(data: bytes, height: int, width: int) -> Tensor:
    """A PNG file of RGB and of this very size -> ``[3, H, W]`` float32 in [0, 1]. Its size is checked before a pixel is
    decoded. Errors: ``ValueError`` on anything else."""
    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as file:
            if (file.height, file.width, file.mode) != (height, width, "RGB"):
                raise ValueError(
                    f"it is {file.mode} of {file.height}x{file.width}, announced as RGB of {height}x{width}"
                )
            pixels = np.array(file)
    except Exception as error:  # Pillow raises OSError, SyntaxError and classes of its own
        raise ValueError(f"unusable PNG image: {error}") from error
    return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255


def data_url(image: Tensor) -> str:
    """``[3, H, W]`` float in [0, 1] -> ``data:image/png;base64,...``"""
    return "data:image/png;base64," + base64.b64encode(encode_png(image)).decode("ascii")

"""Images drawn by code whose prompts are known to fit them, to try a reward on before it trains anything."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rewards.shapes_detector import BACKGROUND, COLORS

SIDE = 256
"""Height and width of the drawings, in pixels."""

_CLEAN = 8  # drawings are made this much larger, then averaged down


@dataclass(frozen=True, kw_only=True)
class Pair:
    """An image and a prompt that describes it, and none of the other pairs' images."""

    image: Tensor
    """``[3, H, W]`` float32 in [0, 1]."""
    prompt: str
    metadata: dict[str, Any]


def scenes() -> list[Pair]:
    """Plain scenes that a model of images and text tells apart: one figure each, and one word."""
    ground = (1.0, 1.0, 1.0)
    return [
        _pair(_figure("circle", (0.85, 0.1, 0.1), ground), "a red circle on a white background"),
        _pair(_figure("square", (0.1, 0.2, 0.85), ground), "a blue square on a white background"),
        _pair(_figure("triangle", (0.95, 0.8, 0.1), (0.0, 0.0, 0.0)), "a yellow triangle on a black background"),
        _pair(_word("HELLO"), 'the word "HELLO" in black letters on a white background'),
    ]


def words() -> list[Pair]:
    """Rendered words and prompts that quote them."""
    return [_pair(_word(word), f'a white sign that reads "{word}"') for word in ("QUIET", "Bakery 27", "Fresh Tomato")]


def shapes() -> list[Pair]:
    """Shapes of the embedded world, with GenEval metadata."""
    wanted = (("circle", "red"), ("square", "blue"), ("triangle", "green"))
    return [
        _pair(
            _figure(shape, COLORS[color], BACKGROUND, extent=0.34),
            f"a photo of a {color} {shape}",
            tag="colors",
            include=[{"class": shape, "count": 1, "color": color}],
        )
        for shape, color in wanted
    ]


def objects() -> list[Pair]:
    """GenEval prompts of everyday objects. No code draws a photograph: the images are blank, and no good pairs."""
    blank = torch.full((3, SIDE, SIDE), 0.5)
    return [
        _pair(blank, f"a photo of a {name}", tag="single_object", include=[{"class": name, "count": 1}])
        for name in ("bench", "dog", "pizza")
    ]


def _pair(image: Tensor, prompt: str, **metadata: Any) -> Pair:
    return Pair(image=image, prompt=prompt, metadata={**metadata, "prompt": prompt})


def _figure(
    shape: str, color: tuple[float, float, float], ground: tuple[float, float, float], extent: float = 0.6
) -> Tensor:
    """One centred figure of ``extent`` of the side."""
    axis = (np.arange(SIDE * _CLEAN) + 0.5) / (SIDE * _CLEAN) * 2 - 1
    u, v = axis / extent, axis[:, None] / extent
    box = (np.abs(u) <= 1) & (np.abs(v) <= 1)
    inside = (box & _INSIDE[shape](u, v)).reshape(SIDE, _CLEAN, SIDE, _CLEAN).mean((1, 3))
    coverage = torch.from_numpy(inside).float()
    return torch.stack([coverage * c + (1 - coverage) * g for c, g in zip(color, ground, strict=True)])


# Points (u right, v down) of the box [-1, 1]^2 that belong to a figure.
_INSIDE: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "circle": lambda u, v: u**2 + v**2 <= 1,
    "square": lambda u, v: np.abs(u) + 0 * v <= 1,
    "triangle": lambda u, v: 2 * np.abs(u) <= v + 1,
}


def _word(text: str) -> Tensor:
    """Black letters on white, as large as fits."""
    from pathlib import Path

    import matplotlib
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.truetype(
        str(Path(matplotlib.get_data_path(), "fonts/ttf/DejaVuSans.ttf")), min(56, 350 // len(text))
    )
    canvas = Image.new("L", (SIDE, SIDE), 255)
    ImageDraw.Draw(canvas).text((SIDE // 2, SIDE // 2), text, font=font, fill=0, anchor="mm")
    return torch.from_numpy(np.array(canvas)).float().div(255).expand(3, -1, -1).clone()

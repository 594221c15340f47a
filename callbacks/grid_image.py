"""Draw generated images, their prompts and their scores as one picture.

Each prompt is a block: its text over its images side by side, a score under each. Blocks are laid out row by row. Small
images are enlarged by a whole factor without interpolation, so that their pixels stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import matplotlib
import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

_SMALLEST, _LARGEST = 96, 256
"""Bounds on the longer side of a drawn image, pixels."""
_WIDTH = 1100
"""Width that blocks may fill, unless a single block is wider, pixels."""
_NARROWEST = 560
"""Least width of the picture, so that a title fits, pixels."""
_GAP, _MARGIN = 4, 16
_TITLE, _HEADING, _TEXT, _SMALL = 18, 15, 13, 11
"""Font sizes, pixels."""
_CAPTION_LINES = 2
_SHELF_WIDTH, _SHELF_SMALLEST, _SHELF_LINES = 256, 192, 3
"""Width of a shelf's blocks and bound on the longer side of its images, pixels, and lines of its captions."""
_INK, _FAINT, _RULE, _PAPER = (20, 20, 20), (110, 110, 110), (210, 210, 210), (255, 255, 255)


@dataclass(frozen=True, kw_only=True)
class Block:
    """One prompt of the picture."""

    caption: str
    images: Tensor
    """``[I, 3, H, W]`` float in [0, 1]; of a video ``[I, 3, F, H, W]`` the middle frame is drawn."""
    scores: Sequence[float] | None
    """[I], or ``None`` to show none."""


@dataclass(frozen=True, kw_only=True)
class Shelf:
    """Blocks side by side under a name."""

    name: str
    blocks: Sequence[Block]
    """Of one image each, all of one size."""


def draw_grid(blocks: Sequence[Block], title: str) -> Image.Image:
    """At least one block, all with images of one size -> RGB picture."""
    drawn = [_draw_block(block) for block in blocks]
    width, height = max(b.width for b in drawn), max(b.height for b in drawn)
    columns = max(1, min(len(drawn), (_WIDTH + _MARGIN) // (width + _MARGIN)))
    rows = math.ceil(len(drawn) / columns)
    head = _TITLE + 2 * _MARGIN
    size = max(_NARROWEST, columns * (width + _MARGIN) + _MARGIN), head + rows * (height + _MARGIN)
    page = Image.new("RGB", size, _PAPER)
    line = _wrap(title, page.width - 2 * _MARGIN, _font(_TITLE), 1)[0]
    ImageDraw.Draw(page).text((_MARGIN, _MARGIN), line, fill=_INK, font=_font(_TITLE))
    for i, block in enumerate(drawn):
        row, column = divmod(i, columns)
        page.paste(block, (_MARGIN + column * (width + _MARGIN), head + row * (height + _MARGIN)))
    return page


def draw_shelves(shelves: Sequence[Shelf], title: str) -> Image.Image:
    """At least one shelf with at least one block -> RGB picture, one shelf below the other."""
    drawn = [
        [
            _draw_block(b, width=_SHELF_WIDTH, smallest=_SHELF_SMALLEST, lines=_SHELF_LINES, digits=".3g")
            for b in shelf.blocks
        ]
        for shelf in shelves
    ]
    columns = max(len(blocks) for blocks in drawn)
    height = max(block.height for blocks in drawn for block in blocks)
    head, step = _TITLE + 2 * _MARGIN, _line(_HEADING) + _GAP + height + _MARGIN
    width = max(_NARROWEST, columns * (_SHELF_WIDTH + _MARGIN) + _MARGIN)
    page = Image.new("RGB", (width, head + len(drawn) * step), _PAPER)
    pen = ImageDraw.Draw(page)
    pen.text((_MARGIN, _MARGIN), _wrap(title, width - 2 * _MARGIN, _font(_TITLE), 1)[0], fill=_INK, font=_font(_TITLE))
    for row, (shelf, blocks) in enumerate(zip(shelves, drawn, strict=True)):
        top = head + row * step
        pen.text((_MARGIN, top), shelf.name, fill=_FAINT, font=_font(_HEADING))
        pen.line([(_MARGIN, top + _line(_HEADING)), (width - _MARGIN, top + _line(_HEADING))], fill=_RULE)
        for column, block in enumerate(blocks):
            page.paste(block, (_MARGIN + column * (_SHELF_WIDTH + _MARGIN), top + _line(_HEADING) + _GAP))
    return page


def to_pictures(images: Tensor) -> list[Image.Image]:
    """``[N, 3, H, W]`` (or the middle frames of ``[N, 3, F, H, W]``) float in [0, 1] -> 8-bit RGB."""
    still = images if images.ndim == 4 else images[:, :, images.shape[2] // 2]
    pixels = (still.detach().float().clamp(0, 1) * 255).round().to(torch.uint8).permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(np.ascontiguousarray(picture)) for picture in pixels]


def _draw_block(
    block: Block,
    *,
    width: int | None = None,
    smallest: int = _SMALLEST,
    lines: int = _CAPTION_LINES,
    digits: str = ".2f",
) -> Image.Image:
    """As wide as its images, or ``width`` pixels; the images stand at the left."""
    tiles = [_resize(picture, smallest) for picture in to_pictures(block.images)]
    side, height = tiles[0].size
    caption_height = lines * _line(_TEXT)
    total = width or len(tiles) * (side + _GAP) - _GAP
    canvas = Image.new("RGB", (total, caption_height + height + _line(_SMALL)), _PAPER)
    pen = ImageDraw.Draw(canvas)
    wrapped = _wrap(block.caption, total, _font(_TEXT), lines)
    for i, text in enumerate(wrapped):
        pen.text((0, caption_height - (len(wrapped) - i) * _line(_TEXT)), text, fill=_INK, font=_font(_TEXT))
    for i, tile in enumerate(tiles):
        canvas.paste(tile, (i * (side + _GAP), caption_height))
        if block.scores is not None:
            centre = (i * (side + _GAP) + side // 2, caption_height + height + 1)
            pen.text(centre, f"{block.scores[i]:{digits}}", fill=_FAINT, font=_font(_SMALL), anchor="ma")
    return canvas


def _resize(picture: Image.Image, smallest: int) -> Image.Image:
    longest = max(picture.size)
    if longest > _LARGEST:
        picture.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS)
        return picture
    factor = math.ceil(smallest / longest)
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont, lines: int) -> list[str]:
    """At most ``lines`` lines that fit ``width`` pixels, broken at spaces where possible; what is cut off ends in "…"."""
    wrapped, rest = [], " ".join(text.split())
    while rest and len(wrapped) < lines:
        fitting = _fitting(rest, width, font)
        if fitting < len(rest) and len(wrapped) == lines - 1:
            wrapped.append(rest[: _fitting(rest, width - int(font.getlength("…")), font)].rstrip() + "…")
            break
        if fitting < len(rest) and rest[fitting] != " " and " " in rest[:fitting]:
            fitting = rest.rindex(" ", 0, fitting)
        wrapped.append(rest[:fitting])
        rest = rest[fitting:].lstrip()
    return wrapped or [""]


def _fitting(text: str, width: int, font: ImageFont.FreeTypeFont) -> int:
    """How many of the first characters fit ``width`` pixels; at least one."""
    low, high = 1, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if font.getlength(text[:middle]) <= width else (low, middle - 1)
    return low


def _line(size: int) -> int:
    return size + 4


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    """DejaVu Sans, which matplotlib brings along: the same picture on every machine."""
    return ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"), size)

"""A picture of the best, the median and the worst samples of an evaluation, each with its prompt and its score."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from callbacks.grid_image import Block, Shelf, draw_shelves

COLUMNS = 4
_EQUAL_SCORES = 0x5EED
"""Seed of the order of samples that score the same."""


def draw_ranking(
    table: Sequence[Mapping[str, Any]], reward: str, place: Callable[[int, int], Path], title: str
) -> Image.Image:
    """At most :data:`COLUMNS` samples of each kind, of different prompts where there are enough.

    Args:
        table: of :meth:`callbacks.estimates.Tally.table`.
        reward: by which samples are ordered.
        place: (prompt's index, image's index) -> its file.
        title: of the picture.
    """
    samples = [(score, row, image) for row in table for image, score in enumerate(row["scores"][reward])]
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(_EQUAL_SCORES)).tolist()
    samples = sorted((samples[k] for k in order), key=lambda sample: -sample[0])  # stable: equal scores stay shuffled
    count = min(COLUMNS, math.ceil(len(samples) / 3))
    middle = samples[(len(samples) - 1) // 2][0]
    ranked = {
        "best": samples,
        "median": sorted(samples, key=lambda sample: abs(sample[0] - middle)),
        "worst": samples[::-1],
    }
    shelves = [
        Shelf(name=name, blocks=[_block(*sample, place) for sample in _different(some, count)])
        for name, some in ranked.items()
    ]
    return draw_shelves(shelves, title)


def _different(samples: Sequence[tuple[float, Any, int]], count: int) -> list[tuple[float, Any, int]]:
    """The first ``count``, but a prompt's second sample only once every prompt has had its first."""
    seen: set[int] = set()
    fresh, again = [], []
    for sample in samples:
        (again if sample[1]["index"] in seen else fresh).append(sample)
        seen.add(sample[1]["index"])
    return [*fresh, *again][:count]


def _block(score: float, row: Mapping[str, Any], image: int, place: Callable[[int, int], Path]) -> Block:
    with Image.open(place(row["index"], image)) as picture:
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)[None] / 255
    return Block(caption=row["prompt"], images=pixels, scores=[score])

"""Rewards for the world "shapes": does the image show what the prompt's GenEval metadata asks for?

The first three modes are GenEval's rules (:mod:`rewards.geneval_rules`) on what :mod:`rewards.shapes_detector` finds:
``soft`` (at most 1, may be negative), ``strict`` and ``correct`` (0 or 1). They see nothing between "no object" and "an
object", so a small model is better trained on the mode ``dense``, in [0, 1]::

    1/4 crispness + 1/4 color_coverage + 1/2 clip(soft, 0, 1)

Both of the first two terms ask for coloured regions of the size of objects. With ``A`` a coloured area in units of the
image, ``k`` a number of objects and ``[lo, hi]`` the areas that one object of this world can have, an area's
plausibility is ``min(1, A / (k lo), (k hi) / A)``; and the object share is the mean over the coloured area of
``min(1, L / l)^2``, with ``l`` the longer side of the connected region's box and ``L`` the greatest that an object can
have (specks count 0). So a blank image scores 0, and a blob, a stripe or a flood of the right colour little.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from rewards.base import Reward
from rewards.geneval_rules import Judgement, Wanted, judge, parse
from rewards.shapes_detector import BACKGROUND, COLORS, MAX_EXTENT, SHAPES, Segmentation, classify, segment

Mode = Literal["soft", "strict", "correct", "dense"]

_OBJECT_AREA = (30 / 32**2, 170 / 32**2)  # least and greatest area of one object, as a share of the image
_FAR = 0.4  # RGB distance from the palette at which a pixel counts as not crisp at all


class ShapesReward(Reward):
    """GenEval's rules on shapes, or the dense training reward built on them (module docstring).

    Args:
        mode: ``soft``, ``strict``, ``correct`` or ``dense``.

    Errors: ``ValueError`` for another mode; on scoring, for metadata without a usable ``include``, or with classes and
    colours that this world does not have.
    """

    reads = "shapes"

    def __init__(self, mode: Mode = "dense") -> None:
        if mode not in get_args(Mode):
            raise ValueError(f"mode {mode!r}: choose one of {get_args(Mode)}")
        self.mode: Mode = mode

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"mode": self.mode}

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """``images [N, 3, H, H]`` float in [0, 1], GenEval metadata [N] -> scores [N] float64."""
        seg = segment(images)
        judgements = _judge(seg, metadata)
        match self.mode:
            case "correct":
                scores = [j.correct for j in judgements]
            case "strict":
                scores = [j.strict_correct for j in judgements]
            case "soft":
                scores = [j.soft_score for j in judgements]
            case "dense":
                wanted = [parse(row) for row in metadata]
                rules = np.clip([j.soft_score for j in judgements], 0, 1)
                scores = (crispness(images, seg, wanted) + color_coverage(seg, wanted)) / 4 + rules / 2
        return torch.as_tensor(np.asarray(scores, dtype=np.float64))


def judge_shapes(images: Tensor, metadata: Sequence[Mapping[str, Any]]) -> list[Judgement]:
    """GenEval's verdict on each of ``images [N, 3, H, H]`` (float in [0, 1]) under its prompt's metadata [N]."""
    return _judge(segment(images), metadata)


def _judge(seg: Segmentation, metadata: Sequence[Mapping[str, Any]]) -> list[Judgement]:
    for row in metadata:
        _check_vocabulary(parse(row))
    return [judge(row, found) for row, found in zip(metadata, classify(seg), strict=True)]


def crispness(images: Tensor, seg: Segmentation, wanted: Sequence[Wanted]) -> np.ndarray:
    """How purely the image is painted in the palette: ``[N]`` in [0, 1].

    A pixel at RGB distance d from the nearest of ground and palette colours has the purity ``max(0, 1 - d / 0.4)``. The
    score is mean purity of the ground x mean purity of the solid pixels x object share x plausibility of the solid area
    (module docstring). Even ideal antialiased edges cost a little.
    """
    palette = torch.tensor([BACKGROUND, *COLORS.values()])
    pixels = images.detach().float().cpu().permute(0, 2, 3, 1).flatten(1, 2)  # [N, HW, 3]
    purity = (1 - torch.cdist(pixels, palette.expand(len(pixels), -1, -1)).amin(-1) / _FAR).clamp(min=0).numpy()
    solid = (seg.color >= 0).reshape(purity.shape)
    amount = [_plausible(area, _count(row)) for area, row in zip(solid.mean(1), wanted, strict=True)]
    return _masked_mean(purity, ~solid) * _masked_mean(purity, solid) * _object_share(seg) * np.array(amount)


def color_coverage(seg: Segmentation, wanted: Sequence[Wanted]) -> np.ndarray:
    """Whether the wanted colours cover plausible areas: ``[N]`` in [0, 1].

    Without named colours: the plausibility of the whole coloured area. With named colours: the mean plausibility of
    each one's area; if every object's colour is named, times the share of the coloured area that has a wanted colour.
    All of it times the object share (module docstring).
    """
    areas = np.stack([(seg.color == c).mean((1, 2)) for c in range(len(COLORS))], axis=1)  # [N, C]
    return _object_share(seg) * np.array([_coverage_of(area, row) for area, row in zip(areas, wanted, strict=True)])


def _coverage_of(areas: np.ndarray, wanted: Wanted) -> float:
    counts = _color_counts(wanted)
    total = float(areas.sum())
    if not counts or total == 0:
        return _plausible(total, _count(wanted))
    match = float(np.mean([_plausible(areas[color], count) for color, count in counts.items()]))
    all_named = sum(counts.values()) == _count(wanted)
    return match * float(areas[list(counts)].sum()) / total if all_named else match


def _object_share(seg: Segmentation) -> np.ndarray:
    """Share of each image's solid area that lies in regions of an object's size: ``[N]`` in [0, 1]."""
    parts = seg.components
    image = parts.plane // len(COLORS)
    weight = np.square(np.minimum(1.0, MAX_EXTENT / parts.extent.max(1)))
    return np.bincount(image, weight * parts.area, len(seg.color)) / np.maximum((seg.color >= 0).sum((1, 2)), 1)


def _color_counts(wanted: Wanted) -> dict[int, int]:
    """Index of each named colour -> number of objects that are to have it."""
    counts: dict[int, int] = {}
    for clause in wanted.include:
        if clause.color is not None:
            index = list(COLORS).index(clause.color)
            counts[index] = counts.get(index, 0) + clause.count
    return counts


def _count(wanted: Wanted) -> int:
    return sum(clause.count for clause in wanted.include)


def _plausible(area: float, objects: int) -> float:
    low, high = _OBJECT_AREA
    return min(1.0, area / (objects * low), objects * high / area) if area > 0 else 0.0


def _masked_mean(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Mean of ``values [N, ...]`` where ``mask``, 0 where the mask is empty."""
    return (values * mask).sum(1) / np.maximum(mask.sum(1), 1)


def _check_vocabulary(wanted: Wanted) -> None:
    for clause in (*wanted.include, *wanted.exclude):
        if clause.class_name not in SHAPES:
            raise ValueError(f"class {clause.class_name!r} is not of the shapes world: use one of {SHAPES}")
        if clause.color is not None and clause.color not in COLORS:
            raise ValueError(f"color {clause.color!r} is not of the shapes world: use one of {tuple(COLORS)}")

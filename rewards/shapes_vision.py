"""The embedded shapes world as GenEval's judge sees any other: its detector and its colours, without networks.

``GenEval(detector=ShapesDetector(), colors=ShapesColors(), threshold=0.0, counting_threshold=0.0)`` gives the very scores of
:class:`rewards.shapes.ShapesReward`: the detector has a threshold of its own (``MIN_CONFIDENCE``), and GenEval's two are
those of another detector's confidences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rewards.geneval_rules import Detection
from rewards.shapes_detector import COLORS, SHAPES, Segmentation, classify, segment
from rewards.vision import ColorClassifier, Detector, Instance


class ShapesDetector(Detector):
    """:mod:`rewards.shapes_detector`; images must be square."""

    name = "shapes"
    classes = SHAPES

    def detect(self, images: Tensor, min_score: float) -> list[list[Instance]]:
        seg = segment(images)
        found = [
            [
                Instance(class_name=name, score=item["score"], box=_corners(item), mask=_mask(seg, n, item))
                for name, items in objects.items()
                for item in items
                if item["score"] > min_score
            ]
            for n, objects in enumerate(classify(seg))
        ]
        return [sorted(instances, key=lambda instance: -instance.score) for instances in found]


class ShapesColors(ColorClassifier):
    """The palette's colour that most of an object's pixels have."""

    colors = tuple(COLORS)

    def classify(self, image: Tensor, instances: Sequence[Instance]) -> list[str]:
        color = segment(image[None]).color[0]  # [H, W]
        counts = [
            np.bincount(color[instance.mask.numpy()] + 1, minlength=len(COLORS) + 1)[1:] for instance in instances
        ]
        return [self.colors[count.argmax()] for count in counts]


def _corners(item: Detection) -> tuple[float, float, float, float]:
    x0, y0, x1, y1 = item["box"]
    return x0, y0, x1, y1


def _mask(seg: Segmentation, image: int, item: Detection) -> Tensor:
    """``[H, W]``: the solid pixels of the component that was found as ``item`` in image number ``image``."""
    color = tuple(COLORS).index(item["color"])
    plane = image * len(COLORS) + color
    parts = seg.components
    (number, *_) = np.flatnonzero((parts.plane == plane) & (parts.box == item["box"]).all(1))
    return torch.from_numpy((parts.owner[plane] == number + 1) & (seg.color[image] == color))

"""What GenEval asks of vision: which objects an image shows, and what colour each of them has.

Both are small interfaces, so that one judge (:mod:`rewards.geneval`) serves any detector and any world: Mask2Former and CLIP
on photographs of COCO's objects, or the parts without networks that know the embedded shapes world.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """One detected object of an image of H x W pixels."""

    class_name: str
    score: float
    """Confidence in [0, 1]."""
    box: tuple[float, float, float, float]
    """``x0, y0, x1, y1`` in pixels of the image, x to the right, y downwards, the far edges exclusive."""
    mask: Tensor
    """``[H, W]`` bool on the CPU: the object's pixels."""


class Part:
    """A part of GenEval that may own frozen networks. The reward that it is given to reads them, casts and moves them; the
    part keeps references and runs them where they are."""

    def __init__(self) -> None:
        self.files: dict[str, Path] = {}
        """The weight files, by network; :meth:`build` fills them in."""

    def build(self) -> dict[str, nn.Module]:
        """Read the networks, by name, in float32 on the CPU; by default there are none. Errors: ``ValueError`` naming what
        is missing and how to get it."""
        return {}

    def identity(self) -> dict[str, Any]:
        """What the results depend on, as plain values."""
        return {"class": f"{type(self).__module__}.{type(self).__qualname__}"}


class Detector(Part, ABC):
    """Finds objects."""

    name: ClassVar[str]
    """Short; results under this detector are called ``geneval_<name>``."""
    classes: ClassVar[tuple[str, ...]]
    """What it can find, in the words of the prompts' metadata."""

    @abstractmethod
    def detect(self, images: Tensor, min_score: float) -> list[list[Instance]]:
        """``images [N, 3, H, W]`` float in [0, 1] -> of each image all objects that score above ``min_score``, by falling
        score. Objects may overlap."""


class ColorClassifier(Part, ABC):
    """Names the colours of detected objects."""

    colors: ClassVar[tuple[str, ...]]
    """What it can answer, in the words of the prompts' metadata."""

    @abstractmethod
    def classify(self, image: Tensor, instances: Sequence[Instance]) -> list[str]:
        """``image [3, H, W]`` float in [0, 1] and some of its objects -> one colour per object."""

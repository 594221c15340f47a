"""GenEval (Ghosh et al. 2023, arXiv:2310.11513): does the image show the objects, counts, colours and places asked for?

A detector finds objects (:class:`rewards.vision.Detector`), a classifier names the colours of those whose colour is asked for
(:class:`rewards.vision.ColorClassifier`), and the rules of :mod:`rewards.geneval_rules` give the verdict. What is between them
follows the official evaluation (public repository djghosh13/geneval):

* objects must score above 0.3, above 0.9 where the prompt's tag is ``counting``;
* of each class the 16 best are kept, overlapping or not;
* boxes are compared with the position threshold 0.1;
* of a clause that asks for a colour the ``count`` best objects are looked at. (The strict and soft scores ask for more only
  where the number of objects is right, so these are all of them.)

By default detector and classifier are Mask2Former Swin-S on ``transformers`` and CLIP ViT-L-14. Call the result
``geneval_hf``, as :meth:`GenEval.identity` does: it is the official protocol with another implementation of the same detector
and other weights, to be compared with itself and not with published GenEval numbers, which come from mmdetection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rewards.base import check_images
from rewards.clip_colors import CLIPColors
from rewards.geneval_rules import Detection, Judgement, Wanted, judge, parse
from rewards.images import refuse_video
from rewards.mask2former import Mask2Former
from rewards.network import NetworkReward, check_choice
from rewards.vision import ColorClassifier, Detector, Instance

MODES = ("soft", "strict", "correct")
COUNTING = "counting"
"""The tag of prompts that are judged by the higher threshold."""

Row = Mapping[str, Any]
"""One line of GenEval's prompt file."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was found in one image, and what that is worth under its prompt."""

    judgement: Judgement
    objects: dict[str, list[Detection]]
    """class -> its objects above the threshold, by falling score, classes in the detector's order. ``color`` is empty
    where no clause asks for it."""

    def score(self, mode: str) -> float:
        """By one of :data:`MODES`."""
        match mode:
            case "soft":
                return self.judgement.soft_score
            case "strict":
                return float(self.judgement.strict_correct)
            case _:
                return float(self.judgement.correct)


class GenEval(NetworkReward):
    """GenEval's score of images under the metadata of their prompts.

    Args:
        mode: "soft", partial credit (at most 1, negative where far too many objects are found), the reward that Flow-GRPO
            trains on; "strict", 0 or 1 with exact counts; "correct", 0 or 1, the official verdict.
        detector: ``None``: :class:`rewards.mask2former.Mask2Former`.
        colors: ``None``: :class:`rewards.clip_colors.CLIPColors`.
        threshold, counting_threshold: objects must score above it, the second for prompts of the tag ``counting``.
        max_per_class: objects of one class that are kept.
        position_threshold: as of :func:`rewards.geneval_rules.relations`.
        device, dtype: see :class:`NetworkReward`; the dtype of both parts' networks.

    Errors: ``ValueError`` on arguments out of range; from :meth:`load`, on missing, truncated or foreign files; on scoring,
    before anything is detected, for metadata without a ``tag`` or a usable ``include`` and for classes and colours that the
    parts do not know.
    """

    reads = "objects"

    def __init__(
        self,
        *,
        mode: Literal["soft", "strict", "correct"] = "soft",
        detector: Detector | None = None,
        colors: ColorClassifier | None = None,
        threshold: float = 0.3,
        counting_threshold: float = 0.9,
        max_per_class: int = 16,
        position_threshold: float = 0.1,
        device: str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        check_choice("mode", mode, MODES)
        for name, value in {"threshold": threshold, "counting_threshold": counting_threshold}.items():
            if not 0 <= value < 1:
                raise ValueError(f"{name}={value}: give a confidence of at least 0 and below 1")
        if max_per_class < 1 or position_threshold < 0:
            raise ValueError(
                f"max_per_class={max_per_class}, position_threshold={position_threshold}: give at least 1 and at least 0"
            )
        self.mode = mode
        self.detector = detector or Mask2Former()
        self.colors = colors or CLIPColors()
        self.threshold, self.counting_threshold = threshold, counting_threshold
        self.max_per_class, self.position_threshold = max_per_class, position_threshold

    @property
    def name(self) -> str:
        """What results are called: ``geneval_hf`` under the default detector."""
        return f"geneval_{self.detector.name}"

    def build(self) -> dict[str, nn.Module]:
        networks = self.detector.build() | self.colors.build()
        self.files = self.detector.files | self.colors.files
        return networks

    def identity(self) -> dict[str, Any]:
        settings = ("mode", "threshold", "counting_threshold", "max_per_class", "position_threshold")
        return (
            super().identity()
            | {
                "name": self.name,
                "protocol": "GenEval, arXiv:2310.11513; detector and weights as named, not mmdetection's",
            }
            | {setting: getattr(self, setting) for setting in settings}
            | {"detector": self.detector.identity(), "colors": self.colors.identity()}
        )

    def measure(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        return torch.tensor([verdict.score(self.mode) for verdict in self._verdicts(images, metadata)])

    @torch.no_grad()
    def evaluate(self, images: Tensor, metadata: Sequence[Row]) -> list[Verdict]:
        """Everything about ``images [N, 3, H, W]`` float in [0, 1] under their prompts' metadata [N]; ``mode`` plays no
        part. Errors: ``ValueError`` as on scoring."""
        check_images(images)
        refuse_video(images, self)
        if len(images) != len(metadata):
            raise ValueError(f"{len(images)} images, {len(metadata)} metadata entries: give one of each per sample")
        self.load()
        device = self.device or images.device
        self.to(device)
        with torch.autocast(device.type, enabled=False):
            return self._verdicts(images.to(device), metadata)

    def _verdicts(self, images: Tensor, metadata: Sequence[Row]) -> list[Verdict]:
        wanted = [self._wanted(row) for row in metadata]
        if not wanted:
            return []
        found = self.detector.detect(images, min(self._threshold(row) for row in metadata))
        return [self._verdict(*sample) for sample in zip(images, metadata, wanted, found, strict=True)]

    def _verdict(self, image: Tensor, row: Row, wanted: Wanted, found: Sequence[Instance]) -> Verdict:
        kept = self._kept(found, self._threshold(row))
        named = self._named_colors(image, wanted, kept)
        objects = {
            name: [Detection(box=list(item.box), score=item.score, color=named.get(id(item), "")) for item in instances]
            for name, instances in kept.items()
        }
        return Verdict(judgement=judge(row, objects, self.position_threshold), objects=objects)

    def _kept(self, found: Sequence[Instance], threshold: float) -> dict[str, list[Instance]]:
        """class -> its best objects."""
        kept: dict[str, list[Instance]] = {}
        for item in sorted(found, key=lambda item: -item.score):
            if item.score > threshold:
                kept.setdefault(item.class_name, []).append(item)
        return {name: kept[name][: self.max_per_class] for name in self.detector.classes if name in kept}

    def _named_colors(self, image: Tensor, wanted: Wanted, kept: dict[str, list[Instance]]) -> dict[int, str]:
        """Identity of each object that the verdict asks a colour of -> its colour."""
        asked: dict[int, Instance] = {}
        for clause in wanted.include:
            best = kept.get(clause.class_name, ())[: clause.count]
            if clause.color is not None and len(best) == clause.count:
                asked |= {id(item): item for item in best}
        if not asked:
            return {}
        return dict(zip(asked, self.colors.classify(image, list(asked.values())), strict=True))

    def _threshold(self, row: Row) -> float:
        return self.counting_threshold if row["tag"] == COUNTING else self.threshold

    def _wanted(self, row: Row) -> Wanted:
        wanted = parse(row)
        if not isinstance(row.get("tag"), str):
            raise ValueError(
                f"metadata['tag'] is {row.get('tag')!r} (keys: {sorted(row)}): it decides the detector's threshold; name one of "
                "GenEval's six kinds of prompts"
            )
        for clause in (*wanted.include, *wanted.exclude):
            if clause.class_name not in self.detector.classes:
                raise ValueError(
                    f"class {clause.class_name!r} is unknown to {type(self.detector).__name__}: use one of "
                    f"{', '.join(self.detector.classes)}"
                )
            if clause.color is not None and clause.color not in self.colors.colors:
                raise ValueError(
                    f"color {clause.color!r} is unknown to {type(self.colors).__name__}: use one of "
                    f"{', '.join(self.colors.colors)}"
                )
        return wanted

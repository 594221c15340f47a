"""Mask2Former (Cheng et al. 2022, arXiv:2112.01527) as GenEval's object detector, on ``transformers``.

GenEval (Ghosh et al. 2023, arXiv:2310.11513) runs mmdetection's Mask2Former Swin-S, trained on COCO instances. The same
architecture with the weights of the authors' own release is on the hub; mmdetection need not be installed, but the weights
are of another training run and a few objects near a threshold fall on its other side. Everything around the network follows
mmdetection 2.x (public repository open-mmlab/mmdetection: the instance configuration
``mask2former_swin-s-p4-w7-224_lsj_8x2_50e_coco`` and ``MaskFormerFusionHead``):

1. **In.** The 8-bit image is scaled, sides kept in ratio, until its short side is 800 or its long side 1333 pixels, padded
   at the right and the bottom with grey (128) to multiples of 32, then normalised. The processor published beside the hub's
   weights squeezes every image to 384 x 384 instead: it is not read. Scaling is PIL's bilinear, as in training the weights
   (mmdetection scales by OpenCV, which differs where images are made smaller).
2. **Out.** With Q queries, C classes, class logits ``l [Q, C + 1]`` (the last is "no object") and mask logits
   ``m [Q, h, w]``: the 100 best of all Q C pairs ``p = softmax(l)[:, :C]`` are kept, so one query may name several classes.
   ``m`` is interpolated bilinearly to the padded image, cropped to the scaled one, and interpolated to the image's own size.
   A mask is ``m > 0``; its object scores ``p * sum(sigmoid(m) [m > 0]) / (sum([m > 0]) + 1e-6)``, and its box is the
   smallest that holds the mask. Overlaps stay: there is no suppression.

``transformers``' own post-processing assigns each pixel to one object and interpolates to 384 x 384; it is not used.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL.Image import Resampling
from torch import Tensor, nn
from torch.nn.functional import interpolate, pad

from rewards.coco import CLASSES
from rewards.files import download_command, find_folder, first_line
from rewards.images import as_pil
from rewards.vision import Detector, Instance

MODEL = "facebook/mask2former-swin-small-coco-instance"
MODEL_FILES = ("config.json", "model.safetensors")
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
"""Of ImageNet, RGB in [0, 255]."""
GREY = 128
DIVISOR = 32
TOP = 100
"""Pairs of a query and a class that one image may keep."""

Size = tuple[int, int]
"""Height and width in pixels."""


class Mask2Former(Detector):
    """COCO's 80 classes by index, under GenEval's names.

    Args:
        model: local folder or hub id of the network, ``config.json`` and ``model.safetensors`` (locally
            ``pytorch_model.bin`` will do).
        short_side, long_side: pixels that images are scaled to; GenEval's are 800 and 1333.

    Errors: ``ValueError`` on sides below 1 or in the wrong order; from :meth:`build`, on missing or truncated files and on
    a network of other than 80 classes.
    """

    name = "hf"
    classes = CLASSES

    def __init__(self, model: str = MODEL, short_side: int = 800, long_side: int = 1333) -> None:
        super().__init__()
        if not 1 <= short_side <= long_side:
            raise ValueError(f"short_side={short_side}, long_side={long_side}: give 1 <= short_side <= long_side")
        self.model, self.short_side, self.long_side = model, short_side, long_side

    def build(self) -> dict[str, nn.Module]:
        what = "GenEval detector Mask2Former"
        folder = find_folder(self.model, MODEL_FILES, what=what)
        get = download_command(MODEL, MODEL_FILES)
        found = [folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()]
        if not found or not (folder / "config.json").is_file():
            raise ValueError(f"{what}: no {' and '.join(MODEL_FILES)} in {folder}; run `{get}` or give another folder")
        from transformers import Mask2FormerForUniversalSegmentation

        try:
            loaded: Any = Mask2FormerForUniversalSegmentation.from_pretrained(
                folder, local_files_only=True, weights_only=True, dtype="float32", output_loading_info=True
            )
        except Exception as error:  # safetensors, pickle and transformers raise classes of their own
            raise ValueError(f"{what}: cannot read {found[0]} ({first_line(error)}); get it again: `{get}`") from error
        self._network, report = loaded
        if missing := report["missing_keys"]:
            raise ValueError(
                f"{what}: {found[0]} lacks {len(missing)} tensors such as {min(missing)}; get it again: `{get}`"
            )
        if (labels := self._network.config.num_labels) != len(CLASSES):
            raise ValueError(
                f"{what}: the network in {folder} knows {labels} classes, not COCO's {len(CLASSES)}; give one trained on COCO "
                f"instances, such as {MODEL}"
            )
        self.files = {"detector": found[0]}
        return {"detector": self._network}

    def identity(self) -> dict[str, Any]:
        sides = {"short_side": self.short_side, "long_side": self.long_side}
        return super().identity() | {"implementation": "transformers", "model": self.model} | sides

    def detect(self, images: Tensor, min_score: float) -> list[list[Instance]]:
        pixels, scaled = preprocess(images, self.short_side, self.long_side)
        output = self._network(pixel_values=pixels.to(images.device, self._network.dtype))
        padded, size = _size(pixels), _size(images)
        return [
            postprocess(classes, masks, padded=padded, scaled=scaled, size=size, min_score=min_score)
            for classes, masks in zip(output.class_queries_logits, output.masks_queries_logits, strict=True)
        ]


def preprocess(images: Tensor, short_side: int, long_side: int) -> tuple[Tensor, Size]:
    """Point 1 of the module: ``images [N, 3, H, W]`` float in [0, 1] -> normalised fp32 pixels ``[N, 3, H', W']`` on the
    CPU, both sides multiples of 32, and the height and width within them that the image takes."""
    height, width = images.shape[-2:]
    factor = min(short_side / min(height, width), long_side / max(height, width))
    rows, columns = max(1, int(height * factor + 0.5)), max(1, int(width * factor + 0.5))
    scaled = [np.array(image.resize((columns, rows), Resampling.BILINEAR)) for image in as_pil(images)]
    pixels = torch.from_numpy(np.stack(scaled)).permute(0, 3, 1, 2).float()
    pixels = pad(pixels, (0, -columns % DIVISOR, 0, -rows % DIVISOR), value=GREY)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (MEAN, STD))
    return (pixels - mean) / std, (rows, columns)


def postprocess(
    class_logits: Tensor, mask_logits: Tensor, *, padded: Size, scaled: Size, size: Size, min_score: float
) -> list[Instance]:
    """Point 2 of the module for one image.

    Args:
        class_logits: ``[Q, C + 1]``.
        mask_logits: ``[Q, h, w]``, of the padded image.
        padded: height and width that the network saw.
        scaled: height and width of the image in it, at its upper left.
        size: height and width of the image itself.
        min_score: objects must score above it.

    Returns:
        At most 100 objects by falling score, class names by index.
    """
    classes = class_logits.shape[1] - 1
    pairs = class_logits.float().softmax(1)[:, :classes].flatten()
    scores, index = pairs.topk(min(TOP, len(pairs)))
    likely = scores > min_score  # a mask can only lower the score
    scores, index = scores[likely], index[likely]
    queries, where = (index // classes).unique(return_inverse=True)
    logits = _resize(mask_logits[queries].float(), padded)[:, : scaled[0], : scaled[1]]
    logits = _resize(logits, size)
    masks = logits > 0
    certainty = (logits.sigmoid() * masks).sum((1, 2)) / (masks.sum((1, 2)) + 1e-6)
    scores = (scores * certainty[where]).cpu()
    order = [k for k in scores.argsort(descending=True, stable=True).tolist() if scores[k] > min_score]
    labels, where, masks = (index % classes).tolist(), where.tolist(), masks.cpu()
    return [
        Instance(
            class_name=CLASSES[labels[k]], score=scores[k].item(), box=mask_box(masks[where[k]]), mask=masks[where[k]]
        )
        for k in order
    ]


def mask_box(mask: Tensor) -> tuple[float, float, float, float]:
    """The smallest box that holds a mask ``[H, W]`` bool, ``x0, y0, x1, y1``, the far edges exclusive; zeros if empty."""
    columns, rows = mask.any(0).nonzero(), mask.any(1).nonzero()
    if not len(columns):
        return 0.0, 0.0, 0.0, 0.0
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def _resize(logits: Tensor, size: Size) -> Tensor:
    """``[K, h, w]`` -> ``[K, *size]``."""
    if not len(logits):
        return logits.new_zeros(0, *size)
    return interpolate(logits[:, None], size=size, mode="bilinear", align_corners=False)[:, 0]


def _size(images: Tensor) -> Size:
    return images.shape[-2], images.shape[-1]

"""CLIPScore, the agreement of image and prompt by an untrained-for-it CLIP, computed by torchmetrics per sample.

    raw = cos(image encoder(x), text encoder(c)),    x100 = 100 raw,    over_30 = exp(s) raw / 30

with s the network's logit scale (exp(s) = 100 for OpenAI's networks). ``x100`` is torchmetrics' scale, ``over_30`` that of
FlowGRPO (github.com/yifan123/flow_grpo); DiffusionNFT's ``logit / 100`` is ``raw`` for OpenAI's networks. The original
CLIPScore (Hessel et al. 2021, arXiv 2104.08718) is ``2.5 max(raw, 0)`` with ViT-B-32. No scale here is cut at 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any, Literal

from torch import Tensor, nn

from rewards.images import eight_bit
from rewards.network import NetworkReward, check_choice

SCALES = ("raw", "x100", "over_30")


class CLIPScore(NetworkReward):
    """How well an image fits its prompt.

    Args:
        scale: "raw", "x100" or "over_30", see the module.
        model: local folder or hub id of a CLIP, with its tokenizer and image processor.
        device, dtype: see :class:`NetworkReward`.

    Errors: ``ValueError`` on an unknown scale, and on missing, truncated or foreign files.
    """

    def __init__(
        self,
        *,
        scale: Literal["raw", "x100", "over_30"] = "raw",
        model: str = "openai/clip-vit-large-patch14",
        device: str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        check_choice("scale", scale, SCALES)
        self.scale, self.model = scale, model

    def build(self) -> dict[str, nn.Module]:
        from rewards.clip import load_clip

        self._clip = load_clip(self.model, self.model, what="CLIPScore")
        self._update = _per_sample_update()
        self.files = {"clip": self._clip.weights}
        return {"clip": self._clip.network}

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"scale": self.scale, "model": self.model}

    def measure(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        factors = {"raw": 1 / 100, "x100": 1.0, "over_30": self._clip.logit_scale / 3000}
        scores, _ = self._update(list(eight_bit(images)), list(prompts), self._clip.network, self._clip.processor)
        assert scores.shape == (len(images),), scores.shape
        return factors[self.scale] * scores


def _per_sample_update() -> Callable[..., tuple[Tensor, int]]:
    """torchmetrics' ``(images, prompts, network, processor) -> (100 cos [N], N)``. The metric's public doors give the
    batch's mean, cut at 0; this is what they average. Errors: ``ValueError`` if torchmetrics has moved it."""
    try:
        from torchmetrics.functional.multimodal.clip_score import _clip_score_update
    except ImportError as error:
        raise ValueError(
            f"torchmetrics {version('torchmetrics')} has no per-sample CLIPScore where 1.9 keeps it: install torchmetrics 1.9"
        ) from error
    return _clip_score_update

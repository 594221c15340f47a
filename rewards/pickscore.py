"""PickScore (Kirstain et al. 2023, arXiv 2305.01569): a CLIP ViT-H-14 fine-tuned on users' choices between two images.

    raw = cos(image encoder(x), text encoder(c)),    logit = exp(s) raw,    over_26 = logit / 26

with s the network's trained logit scale. ``logit`` is what the authors' model card computes (about 18 to 24), ``over_26``
what FlowGRPO (github.com/yifan123/flow_grpo) and its descendants train on and report, ``raw`` what DanceGRPO logs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from rewards.network import NetworkReward, check_choice

SCALES = ("raw", "over_26", "logit")


class PickScore(NetworkReward):
    """How people would choose among images of one prompt.

    Args:
        scale: "raw", "over_26" or "logit", see the module.
        model: local folder or hub id of the network.
        processor: local folder or hub id of the tokenizer and image processor; the published network comes without.
        device, dtype: see :class:`NetworkReward`.

    Errors: ``ValueError`` on an unknown scale, and on missing, truncated or foreign files.
    """

    def __init__(
        self,
        *,
        scale: Literal["raw", "over_26", "logit"] = "raw",
        model: str = "yuvalkirstain/PickScore_v1",
        processor: str = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K",
        device: str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        check_choice("scale", scale, SCALES)
        self.scale, self.model, self.processor = scale, model, processor

    def build(self) -> dict[str, nn.Module]:
        from rewards.clip import load_clip

        self._clip = load_clip(self.model, self.processor, what="PickScore")
        self.files = {"clip": self._clip.weights}
        return {"clip": self._clip.network}

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"scale": self.scale, "model": self.model, "processor": self.processor}

    def measure(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        from rewards.clip import image_features, text_features

        clip = self._clip
        image = image_features(clip.network, clip.processor, images)
        text = text_features(clip.network, clip.processor, prompts)
        factors = {"raw": 1.0, "over_26": clip.logit_scale / 26, "logit": clip.logit_scale}
        return factors[self.scale] * cosine_similarity(image, text)

"""LAION's aesthetic predictors: a small head on the normalised image features of OpenAI's CLIP ViT-L-14.

    score(x) = head(f / |f|),  f = image encoder(x)

``linear`` is the first version (github.com/LAION-AI/aesthetic-predictor): one affine map. ``mlp`` is the second
(github.com/christophschuhmann/improved-aesthetic-predictor), used by DDPO and FlowGRPO: five affine maps with dropout but
no activation between them, so affine as a whole too. Scores run from about 1 to 10. The prompt is not read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import normalize

from rewards.files import fill, find_file, read_weights
from rewards.network import NetworkReward, check_choice

_LINEAR_FILE = "sa_0_4_vit_l_14_linear.pth"
_LINEAR_GET = f"curl -LO https://github.com/LAION-AI/aesthetic-predictor/raw/main/{_LINEAR_FILE}"
HEADS = {
    "mlp": ("aesthetic-model.pth", "hf download trl-lib/ddpo-aesthetic-predictor aesthetic-model.pth"),
    "linear": (_LINEAR_FILE, _LINEAR_GET),
}
"""Head -> its usual file and the command that gets it. The hub's file is a copy of ``sac+logos+ava1-l14-linearMSE.pth``."""
WIDTHS = (1024, 128, 64, 16, 1)
"""Widths of the MLP after its input."""
DROPOUT = (0.2, 0.2, 0.1)


class Aesthetic(NetworkReward):
    """How much people like to look at an image.

    Args:
        head: "mlp" or "linear".
        head_weights: the head's state dict, as file, as folder that holds it, or as hub id. The linear head is on no hub:
            give a path.
        model: local folder or hub id of the CLIP whose features the head was trained on, with its image processor.
        device, dtype: see :class:`NetworkReward`.

    Errors: ``ValueError`` on an unknown head, and on missing, truncated or foreign files.
    """

    reads = "image"

    def __init__(
        self,
        *,
        head: Literal["mlp", "linear"] = "mlp",
        head_weights: str = "trl-lib/ddpo-aesthetic-predictor",
        model: str = "openai/clip-vit-large-patch14",
        device: str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        check_choice("head", head, HEADS)
        self.head, self.head_weights, self.model = head, head_weights, model

    def build(self) -> dict[str, nn.Module]:
        from rewards.clip import load_clip

        name, get = HEADS[self.head]
        what = f"aesthetic {self.head} head"
        file = find_file(self.head_weights, name, what=what, get=get)
        weights = read_weights(file)
        self._clip = load_clip(self.model, self.model, what="aesthetic")
        config: Any = self._clip.network.config
        head = make_head(self.head, config.projection_dim)
        fill(head, weights, file=file, what=what)
        self.files = {"clip": self._clip.weights, "head": file}
        return {"clip": self._clip.network, "head": head}

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"head": self.head, "model": self.model}

    def measure(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        from rewards.clip import image_features

        features = normalize(image_features(self._clip.network, self._clip.processor, images))
        return self.networks["head"](features.to(self.dtype)).float().squeeze(1)


def make_head(kind: str, width: int) -> nn.Module:
    """``[N, width]`` -> ``[N, 1]``, untrained; parameters are named as in the published files."""
    if kind == "linear":
        return nn.Linear(width, 1)
    layers: list[nn.Module] = []
    for index, (inputs, outputs) in enumerate(zip((width, *WIDTHS), WIDTHS, strict=False)):
        layers.append(nn.Linear(inputs, outputs))
        if index < len(DROPOUT):
            layers.append(nn.Dropout(DROPOUT[index]))
    head = nn.Sequential()
    head.layers = nn.Sequential(*layers)
    return head

"""GenEval's colour classifier: OpenAI's CLIP ViT-L-14, zero-shot, on the object cut out of its image.

For an object of class A with box b and mask M (Ghosh et al. 2023, arXiv:2310.11513; public repository djghosh13/geneval)::

    crop  = (M x + (1 - M) grey)[b]                                       grey = #999 = (153, 153, 153)
    w_c   = unit(mean over t of unit(text encoder(t(c, A))))              of colour c and the three templates t
    color = argmax over c of unit(image encoder(crop)) . w_c

The crop is resized by PIL (bicubic, short side 224), its central square taken and normalised: open_clip's transform.
OpenAI's weights want the network with QuickGELU. open_clip 2.x, which GenEval pins, chooses that by itself; open_clip 3 runs
``ViT-L-14`` with them under the exact GELU and only warns, which gives other colours: hence the architecture's name here.
GenEval computes in half precision on the accelerator (autocast); here the dtype is the reward's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import normalize

from rewards.files import fill, find_file, read_weights
from rewards.images import as_pil
from rewards.open_clip_network import make_network
from rewards.vision import ColorClassifier, Instance

WEIGHTS = "timm/vit_large_patch14_clip_224.openai"
WEIGHTS_FILE = "open_clip_model.safetensors"
TEMPLATES = ("a photo of a {color} {object}", "a photo of a {color}-colored {object}", "a photo of a {color} object")
GREY = (153, 153, 153)


class CLIPColors(ColorClassifier):
    """One of GenEval's ten colours.

    Args:
        weights: state dict of the CLIP in open_clip's names, as file, as folder that holds ``open_clip_model.safetensors``,
            or as hub id.
        architecture: open_clip's name of the network, or the path of a JSON file in open_clip's format.

    Errors: ``ValueError`` from :meth:`build` on an unknown architecture and on missing, truncated or foreign weights.
    """

    colors = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")

    def __init__(self, weights: str = WEIGHTS, architecture: str = "ViT-L-14-quickgelu") -> None:
        super().__init__()
        self.weights, self.architecture = weights, architecture

    def build(self) -> dict[str, nn.Module]:
        what = "GenEval colour classifier CLIP weights"
        file = find_file(self.weights, WEIGHTS_FILE, what=what, get=f"hf download {WEIGHTS} {WEIGHTS_FILE}")
        network, self._tokenizer = make_network(self.architecture)
        fill(network, read_weights(file), file=file, what=what)
        self._network: Any = network
        self._texts: dict[str, Tensor] = {}
        self.files = {"colors": file}
        return {"colors": network}

    def identity(self) -> dict[str, Any]:
        return super().identity() | {"architecture": self.architecture, "clip": self.weights}

    def classify(self, image: Tensor, instances: Sequence[Instance]) -> list[str]:
        if not instances:
            return []
        return [self.colors[index] for index in self.likeness(image, instances).argmax(1).tolist()]

    def likeness(self, image: Tensor, instances: Sequence[Instance]) -> Tensor:
        """``image [3, H, W]`` and K > 0 of its objects -> ``[K, colours]``: the cosine whose largest decides."""
        (picture,) = as_pil(image[None])
        pixels = torch.stack([self._transform(cut_out(picture, instance)) for instance in instances])
        features = self._features(self._network.encode_image, pixels)  # [K, P]
        texts = torch.stack([self._color_texts(instance.class_name) for instance in instances])  # [K, colours, P]
        return torch.einsum("kcp,kp->kc", texts, features)

    @property
    def _transform(self) -> Any:
        """PIL image -> ``[3, S, S]``."""
        import open_clip

        return open_clip.image_transform(self._network.visual.image_size[0], is_train=False)

    def _color_texts(self, class_name: str) -> Tensor:
        """``[colours, P]``: the unit vector of each colour for a class; kept, since classes return."""
        if class_name not in self._texts:
            texts = [template.format(color=c, object=class_name) for c in self.colors for template in TEMPLATES]
            features = self._features(self._network.encode_text, self._tokenizer(texts))
            self._texts[class_name] = normalize(features.unflatten(0, (-1, len(TEMPLATES))).mean(1), dim=1)
        return self._texts[class_name]

    def _features(self, encode: Any, inputs: Tensor) -> Tensor:
        """Unit features ``[N, P]``, fp32 on the CPU."""
        parameter = next(self._network.parameters())
        if inputs.is_floating_point():
            inputs = inputs.to(parameter.dtype)
        features = encode(inputs.to(parameter.device))
        assert features.ndim == 2, features.shape
        return normalize(features.float().cpu(), dim=1)


def cut_out(picture: Image.Image, instance: Instance) -> Image.Image:
    """The object on grey ground, cropped to its box."""
    mask = Image.fromarray(instance.mask.numpy())
    x0, y0, x1, y1 = (round(edge) for edge in instance.box)
    return Image.composite(picture, Image.new("RGB", picture.size, GREY), mask).crop((x0, y0, x1, y1))

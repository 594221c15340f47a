"""HPSv2 (Wu et al. 2023, arXiv 2306.09341): a CLIP ViT-H-14 fine-tuned on human choices.

    score(x, c) = cos(image encoder(x), text encoder(c))

Scores of v2.0 and v2.1 are not comparable, so the version has no default; nor are scores of different prompts. The
benchmark reports ``100 cos``.

Preprocessing is that of the public package (github.com/tgxs002/HPSv2, ``light_augmentation=True`` in its scoring and
benchmark code), which is not open_clip's: the 8-bit image becomes a float tensor, is resized bicubically until its LONGEST
side fits, is padded with black to a square, then normalised. Nothing is cropped and nothing is rounded after the resize.
The package leaves ``antialias`` to torchvision, whose default for tensors changed from off to on in 0.17 (2023-12), after
the paper's numbers: ``antialias=True`` is what the package computes today, ``False`` what it computed then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.functional import cosine_similarity

from rewards.files import fill, find_file, read_weights
from rewards.images import eight_bit
from rewards.network import NetworkReward, check_choice
from rewards.open_clip_network import make_network

FILES = {"v2.0": "HPS_v2_compressed.pt", "v2.1": "HPS_v2.1_compressed.pt"}
"""Version -> checkpoint in ``xswu/HPSv2``."""
SCALES = {"raw": 1.0, "x100": 100.0}


class HPSv2(NetworkReward):
    """``scale * cos`` of image and prompt.

    Args:
        version: "v2.0" or "v2.1".
        scale: "raw" cosine (0.2 to 0.35 for real images), or "x100" as in the benchmark.
        weights: the checkpoint, as file, as folder that holds it, or as hub id.
        architecture: open_clip's name of the network, or the path of a JSON file in open_clip's format.
        antialias: of the resize, see the module.
        device, dtype: see :class:`NetworkReward`.

    Errors: ``ValueError`` on an unknown version, scale or architecture, and on missing, truncated or foreign weights, a
    checkpoint of the other version included.
    """

    def __init__(
        self,
        *,
        version: Literal["v2.0", "v2.1"],
        scale: Literal["raw", "x100"] = "raw",
        weights: str = "xswu/HPSv2",
        architecture: str = "ViT-H-14",
        antialias: bool = True,
        device: str | None = None,
        dtype: str = "float32",
    ) -> None:
        super().__init__(device=device, dtype=dtype)
        check_choice("version", version, FILES)
        check_choice("scale", scale, SCALES)
        self.version, self.scale, self.weights = version, scale, weights
        self.architecture, self.antialias = architecture, antialias

    def build(self) -> dict[str, nn.Module]:
        what = f"HPSv2 {self.version} weights"
        get = f"hf download xswu/HPSv2 {FILES[self.version]}"
        file = find_file(self.weights, FILES[self.version], what=what, get=get)
        if file.name in set(FILES.values()) - {FILES[self.version]}:
            raise ValueError(f"version={self.version!r}, but {file} is the checkpoint of the other version: change one")
        network, self._tokenizer = make_network(self.architecture)
        weights = read_weights(file)
        if "state_dict" not in weights:
            raise ValueError(f"{what}: {file} has no 'state_dict'; to get the checkpoint: {get}")
        fill(network, weights["state_dict"], file=file, what=what)
        self.files = {"clip": file}
        return {"clip": network}

    def identity(self) -> dict[str, Any]:
        settings = {"version": self.version, "scale": self.scale, "antialias": self.antialias}
        return super().identity() | settings | {"architecture": self.architecture}

    def measure(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        network: Any = self.networks["clip"]
        size = network.visual.image_size[0]
        pixels = preprocess(eight_bit(images), size, antialias=self.antialias)
        image = network.encode_image(pixels.to(self.dtype)).float()
        text = network.encode_text(self._tokenizer(list(prompts)).to(images.device)).float()
        assert image.shape == text.shape and image.ndim == 2, (image.shape, text.shape)
        return SCALES[self.scale] * cosine_similarity(image, text)


def preprocess(images: Tensor, size: int, *, antialias: bool = True) -> Tensor:
    """uint8 ``[N, 3, H, W]`` -> fp32 ``[N, 3, size, size]``, normalised: the module's second paragraph."""
    from open_clip import OPENAI_DATASET_MEAN, OPENAI_DATASET_STD
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.functional import normalize, pad, resize

    pixels = images.float() / 255
    factor = size / max(pixels.shape[-2:])
    height, width = (max(1, round(side * factor)) for side in pixels.shape[-2:])
    if factor != 1:
        pixels = resize(pixels, [height, width], InterpolationMode.BICUBIC, antialias=antialias)
    left, top = (size - width) // 2, (size - height) // 2
    pixels = pad(pixels, [left, top, size - width - left, size - height - top])
    return normalize(pixels, list(OPENAI_DATASET_MEAN), list(OPENAI_DATASET_STD))

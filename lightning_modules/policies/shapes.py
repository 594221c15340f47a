"""The embedded small policy: Stable Diffusion 3's transformer on 32 x 32 pixels, with a word-level text embedding.

The backbone is diffusers' ``SD3Transformer2DModel`` (MMDiT: Esser et al. 2024, "Scaling Rectified Flow Transformers for
High-Resolution Image Synthesis") and works in pixel space: a latent is ``2 * image - 1``. Its text conditioning comes
from a table of words, learned in pretraining and frozen in RL. Timesteps behind the door are ``1000 * sigma``.

The network predicts the clean image: ``v = (x - x_0(x)) / max(sigma, 0.05)``. A patch of pixels has more dimensions than
the network is wide; the noise fills all of them, the images do not (Li and He 2025, "Back to Basics: Let Denoising
Generative Models Denoise").

Notation: N rows, L words of a prompt after padding, D width.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lightning_modules.policies.base import FrozenParts, Policy
from lightning_modules.types import Conditioning

_WORDS = """
    a an and of photo picture image drawing sketch two three four left right above below
    circle circles square squares triangle triangles cross crosses ring rings
    red green blue yellow purple black
"""
VOCABULARY = tuple(_WORDS.split())
"""The words a prompt may use."""
_TOKENS = {word: token for token, word in enumerate(VOCABULARY, start=1)}  # 0 pads
MAX_WORDS = 12
"""Words of the longest prompt; every prompt is padded to this length."""
IMAGE_SIZE = 32
"""Height and width, pixels."""
MIN_SIGMA = 0.05
"""Least noise level that the difference to the clean image is divided by."""
PACKAGED_WEIGHTS = str(Path(__file__).with_name("shapes_base.safetensors"))
"""The pretrained weights that come with the package."""
_FORMAT = "lean-grpo-shapes-2"


class WordEmbedding(nn.Module):
    """Prompts -> one vector per word (with its learned position) and one pooled vector."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(1 + len(VOCABULARY), width)  # entry 0 pads
        self.positions = nn.Parameter(torch.randn(MAX_WORDS, width))
        self.pool = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        """``tokens [N, L]`` int64 -> ``text [N, L, D]`` and ``pooled [N, D]`` (from the mean over the words)."""
        text = self.words(tokens) + self.positions
        real = (tokens > 0).to(text.dtype)[..., None]
        return {"text": text, "pooled": self.pool((text * real).sum(1) / real.sum(1))}


def tokenize(prompts: Sequence[str]) -> Tensor:
    """Prompts -> ``[N, MAX_WORDS]`` int64, 0 = padding. Case and a final full stop do not matter.

    Raises:
        ValueError: on an unknown word, on no word, and on more than :data:`MAX_WORDS`.
    """
    tokens = torch.zeros(len(prompts), MAX_WORDS, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        words = prompt.lower().rstrip(". \n").split()
        if not 1 <= len(words) <= MAX_WORDS:
            raise ValueError(f"prompt {prompt!r} has {len(words)} words: the shapes policy reads 1 to {MAX_WORDS}")
        for column, word in enumerate(words):
            if word not in _TOKENS:
                raise ValueError(
                    f"unknown word {word!r} in prompt {prompt!r}: the shapes policy knows only {', '.join(VOCABULARY)}"
                )
            tokens[row, column] = _TOKENS[word]
    return tokens


class ShapesPolicy(Policy):
    """A text-to-image flow model for the shapes world.

    Args:
        weights: a file written by :meth:`save_weights`, by default the packaged one; ``None`` starts at random.
        num_layers: transformer blocks.
        width: channels of the transformer and of the text embedding; a multiple of ``num_heads``.
        num_heads: attention heads.
        patch_size: pixels per side of a token's patch; divides 32.

    Raises:
        ValueError: on an impossible architecture and on weights that are missing, damaged or of another architecture.
    """

    def __init__(
        self,
        weights: str | None = PACKAGED_WEIGHTS,
        *,
        num_layers: int = 4,
        width: int = 128,
        num_heads: int = 4,
        patch_size: int = 8,
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width {width} is no multiple of num_heads {num_heads}")
        if IMAGE_SIZE % patch_size:
            raise ValueError(f"patch_size {patch_size} does not divide the image size {IMAGE_SIZE}")
        self.architecture = {
            "num_layers": num_layers, "width": width, "num_heads": num_heads, "patch_size": patch_size,
        }  # fmt: skip
        self.transformer = SD3Transformer2DModel(
            sample_size=IMAGE_SIZE,
            patch_size=patch_size,
            in_channels=3,
            out_channels=3,
            num_layers=num_layers,
            num_attention_heads=num_heads,
            attention_head_dim=width // num_heads,
            joint_attention_dim=width,
            caption_projection_dim=width,
            pooled_projection_dim=width,
            pos_embed_max_size=IMAGE_SIZE // patch_size,
        )
        self.frozen = FrozenParts(text=WordEmbedding(width))
        self.path = weights
        if weights is not None:
            self._load_weights(weights)

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return (3, IMAGE_SIZE, IMAGE_SIZE)

    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        return self.embed(prompts)

    def embed(self, prompts: Sequence[str]) -> Conditioning:
        """:meth:`encode` with gradients into the text embedding, for pretraining."""
        text = self.frozen.text
        tokens = tokenize(prompts).to(next(text.parameters()).device)
        return Conditioning(tensors=text(tokens)).to(self.device)

    def forward(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        dtype = self.transformer.dtype
        clean = self.transformer(
            hidden_states=latents.to(dtype),
            timestep=1000.0 * sigma,  # not cast: bf16 would round it to a few steps
            encoder_hidden_states=conditioning.tensors["text"].to(dtype),
            pooled_projections=conditioning.tensors["pooled"].to(dtype),
            return_dict=False,
        )[0]
        divisor = sigma.clamp(min=MIN_SIGMA).view(-1, 1, 1, 1)
        return ((latents - clean.to(latents.dtype)) / divisor).to(latents.dtype)

    def decode(self, latents: Tensor) -> Tensor:
        return ((latents.float() + 1) / 2).clamp(0, 1)

    def identity(self) -> dict[str, Any]:
        """Also ``path``, the file's name, and the architecture."""
        return super().identity() | {"path": self.path and Path(self.path).name, **self.architecture}

    def drawing(self) -> dict[str, Any]:
        return super().drawing() | {"height": IMAGE_SIZE, "width": IMAGE_SIZE}

    def save_weights(self, path: str | Path, *, made_by: Mapping[str, object]) -> None:
        """Write transformer and text embedding as safetensors: parameters in bf16, buffers as they are.

        ``made_by`` says in JSON's types what made the weights (seed, steps, loss); it is kept in the file's header,
        with the architecture, the vocabulary and a checksum.
        """
        tensors = {name: _packed(tensor) for name, tensor in self._weights().items()}
        header = {
            "format": _FORMAT,
            "architecture": json.dumps(self.architecture),
            "vocabulary": " ".join(VOCABULARY),
            "sha256": _checksum(tensors),
            "made_by": json.dumps(dict(made_by)),
        }
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata=header)

    def _weights(self) -> dict[str, Tensor]:
        """Name -> tensor of everything that pretraining makes; the tensors are the modules' own."""
        transformer = {f"transformer.{name}": t for name, t in self.transformer.state_dict(keep_vars=True).items()}
        text = {f"text.{name}": t for name, t in self.frozen.text.state_dict(keep_vars=True).items()}
        return transformer | text

    @torch.no_grad()
    def _load_weights(self, path: str) -> None:
        header, tensors = _read(path)
        if json.loads(header["architecture"]) != self.architecture:
            raise ValueError(
                f"weights {path} have architecture {header['architecture']}, asked for {self.architecture}"
            )
        if header["vocabulary"] != " ".join(VOCABULARY):
            raise ValueError(f"weights {path} were made for another vocabulary: {header['vocabulary']}")
        mine = self._weights()
        if mine.keys() != tensors.keys():
            raise ValueError(f"weights {path} and the policy differ in {sorted(mine.keys() ^ tensors.keys())}")
        if _checksum(tensors) != header["sha256"]:
            raise ValueError(f"weights {path} fail their checksum: the file is damaged, fetch or make it again")
        for name, tensor in mine.items():
            tensor.copy_(tensors[name])


def _packed(tensor: Tensor) -> Tensor:
    is_parameter = isinstance(tensor, nn.Parameter)
    return tensor.detach().to("cpu", torch.bfloat16 if is_parameter else tensor.dtype).contiguous()


def _read(path: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Header and tensors of a file that :meth:`ShapesPolicy.save_weights` wrote."""
    if not Path(path).is_file():
        raise ValueError(f"no weights at {path}: make them with the pretraining configuration, or give weights=None")
    try:
        with safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(
            f"weights {path} are no readable safetensors file ({error}): fetch or make it again"
        ) from error
    if header.get("format") != _FORMAT:
        raise ValueError(f"weights {path} have format {header.get('format')!r}, expected {_FORMAT!r}")
    return header, tensors


def _checksum(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

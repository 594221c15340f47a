"""Released architectures with random weights: for plans and timings, which need a model's size and not its skill."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import torch
import yaml
from torch import Tensor, nn

from lightning_modules.policies.diffusers_base import DiffusersPolicy
from lightning_modules.policies.flux import FluxPolicy
from lightning_modules.policies.loading import DTYPES
from lightning_modules.policies.lora import LoRA
from lightning_modules.policies.sd3 import SD3Policy
from lightning_modules.policies.text import TextEncoder
from lightning_modules.policies.wan import WanPolicy

ROOT = Path(__file__).resolve().parent.parent
FAMILIES: dict[str, type[DiffusersPolicy]] = {
    "FluxTransformer2DModel": FluxPolicy, "SD3Transformer2DModel": SD3Policy, "WanTransformer3DModel": WanPolicy,
}  # fmt: skip
"""Class of the transformer -> its policy."""
VAES = {
    "flux_dev": "image", "sd35_medium": "image", "sd35_large": "image",
    "wan21_1_3b": "wan21", "wan21_14b": "wan21", "wan22_ti2v_5b": "wan22_ti2v_5b",
}  # fmt: skip
"""File in ``configs/model`` -> file in ``configs/vae``."""
CLIP_TOKENS = 77
"""Tokens of CLIP that SD3 puts before T5's."""


class RandomText(TextEncoder):
    """Embeddings of the right shape, dtype and place, and of no meaning.

    Args:
        shapes: name -> shape of one row; the length of ``text`` is set by each call.
        extra: tokens of ``text`` beside those of the long encoder.
    """

    name = "random"

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], dtype: torch.dtype, device: str, extra: int = 0) -> None:
        self._shapes, self._dtype, self._device, self._extra = dict(shapes), dtype, device, extra

    @property
    def modules(self) -> dict[str, nn.Module]:
        return {}

    def __call__(self, prompts: Sequence[str], max_sequence_length: int, device: torch.device) -> dict[str, Tensor]:
        lengths = {"text": (max_sequence_length + self._extra,)}
        return {
            name: torch.randn(len(prompts), *lengths.get(name, ()), *shape, dtype=self._dtype, device=self._device)
            for name, shape in self._shapes.items()
        }


def described(folder: str, name: str) -> dict[str, Any]:
    """``class_path`` and ``init_args`` of a file in ``configs/<folder>``. Errors: ``ValueError`` naming those there are."""
    file = ROOT / "configs" / folder / f"{name}.yaml"
    if not file.is_file():
        known = sorted(path.stem for path in file.parent.glob("*.yaml"))
        raise ValueError(f"no {folder} {name!r} is on file: choose one of {', '.join(known)}")
    return yaml.safe_load(file.read_text(encoding="utf-8"))


def component(described: Mapping[str, Any], dtype: str, device: str, **changes: Any) -> nn.Module:
    """A diffusers model with random weights (none on ``meta``), built in fp32 and cast as its loader would; ``changes`` to
    its arguments."""
    kind = getattr(diffusers, described["class_path"].rpartition(".")[2])
    with torch.device(device):
        made = kind(**described["init_args"] | changes)
    keep = set(made._keep_in_fp32_modules or ())
    for tensors in (made.named_parameters(), made.named_buffers()):
        for name, tensor in tensors:
            if tensor.is_floating_point() and not keep & set(name.split(".")):
                tensor.data = tensor.data.to(DTYPES[dtype])
    return made


def untrained(
    model: str,
    *,
    dtype: str = "bfloat16",
    device: str = "cpu",
    smaller: dict[str, Any] | None = None,
    smaller_vae: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
) -> DiffusersPolicy:
    """The policy of a released model as it would be before its weights are loaded; the VAE in fp32.

    Args:
        model: file in ``configs/model``, without its ending.
        dtype: of the transformer and the embeddings.
        device: where it is made; ``meta`` makes nothing.
        smaller, smaller_vae: arguments of the architectures to change.
        options: of the policy (``height``, ``width``, ...).
    """
    transformer = component(described("model", model), dtype, device, **smaller or {})
    vae = component(described("vae", VAES[model]), "float32", device, **smaller_vae or {})
    family, given = FAMILIES[type(transformer).__name__], dict(options or {})
    config: Any = transformer.config
    shapes = {"text": (config.get("joint_attention_dim") or config["text_dim"],)}
    if "pooled_projection_dim" in config:
        shapes["pooled"] = (config["pooled_projection_dim"],)
    if isinstance(given.get("lora"), dict):
        given["lora"] = LoRA(**given["lora"])
    return family(
        transformer=transformer,
        text=RandomText(shapes, DTYPES[dtype], device, CLIP_TOKENS if family is SD3Policy else 0),
        vae=vae,
        **given,
    )

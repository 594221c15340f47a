"""FLUX.1 (Black Forest Labs 2024) on diffusers' ``FluxTransformer2DModel``.

Text: T5 along the tokens, the pooled CLIP vector for modulation. A latent is ``[16, H/8, W/8]``; behind the door 2 x 2 of
its pixels make one token of 64 channels, with its position ``(0, row, column)``; text tokens stand at ``(0, 0, 0)``.

Guidance is embedded, not computed from two forwards: FLUX.1-dev was distilled to take the scale as an input. The
transformer reads ``sigma`` (and the scale) in its own dtype and multiplies by 1000: in bf16 weights the timestep is
rounded there, the same way in the rollout and in a recomputation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_flux import FluxTransformer2DModel
from diffusers.pipelines.flux.pipeline_flux import FluxPipeline
from torch import Tensor

from lightning_modules.policies.diffusers_base import (
    Config,
    DiffusersPolicy,
    check_channels,
    check_multiple,
    check_still,
)
from lightning_modules.policies.loading import load_parts
from lightning_modules.policies.lora import LoRA
from lightning_modules.policies.sd3 import image_scale
from lightning_modules.policies.text import PipelineText

PATCH = 2
"""Latent pixels per side of a token."""


class FluxText(PipelineText):
    """CLIP-L (pooled) and T5: ``text [N, L, D]``, ``pooled [N, P]``."""

    components = {
        "tokenizer": "CLIPTokenizer", "text_encoder": "CLIPTextModel",
        "tokenizer_2": "T5Tokenizer", "text_encoder_2": "T5EncoderModel",
    }  # fmt: skip

    def __call__(self, prompts: Sequence[str], max_sequence_length: int, device: torch.device) -> dict[str, Tensor]:
        text, pooled, _ = self.pipeline.encode_prompt(
            list(prompts), device=device, max_sequence_length=max_sequence_length
        )
        return {"text": text, "pooled": pooled}


class FluxPolicy(DiffusersPolicy):
    """Text to image. Size: multiples of 16 (VAE 8 x patch 2).

    Args:
        guidance: the embedded guidance scale, at least 0, 0 and 1 included; ``None``: the model embeds none (FLUX.1-schnell).
            Rollout, update and evaluation use the same.
        options: see ``DiffusersPolicy``.

    Errors: ``ValueError`` also if ``guidance`` and the model's ``guidance_embeds`` disagree.
    """

    pipeline_class, transformer_class, vae_class = FluxPipeline, FluxTransformer2DModel, AutoencoderKL
    text_class = FluxText
    default_lora = LoRA(
        rank=64,
        alpha=128,
        targets=(
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
            "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
            "ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2",
        ),
    )  # fmt: skip
    """FlowGRPO's (arXiv 2505.05470): attention and feed-forward of the dual blocks; of the single blocks q, k and v."""
    default_max_sequence_length = 512

    def __init__(self, *, guidance: float | None = 3.5, **options: Any) -> None:
        self.guidance = _check_guidance(guidance)
        super().__init__(**options)

    @classmethod
    def from_pretrained(
        cls,
        path: str,
        *,
        height: int,
        width: int,
        variant: str | None = None,
        revision: str | None = None,
        dtype: str = "bfloat16",
        **options: Any,
    ) -> FluxPolicy:
        """Load ``path``, a hub id or a local folder of a ``FluxPipeline``.

        Args:
            variant, revision: of the files, as on the hub; ``None``: the default ones.
            dtype: of transformer and text encoders: ``float32``, ``bfloat16``, ``float16``. Adapters have their own.
            height, width, options: as for the class.

        Errors: ``ValueError``, before weights are read where possible: see ``policies.loading``.
        """
        parts = load_parts(
            FluxPolicy, path, variant=variant, revision=revision, dtype=dtype, height=height, width=width, **options
        )
        return FluxPolicy(
            transformer=parts.transformer, text=parts.text, vae=parts.vae, height=height, width=width, **options
        )

    @property
    def num_tokens(self) -> int:
        return (self.latent_shape[1] // PATCH) * (self.latent_shape[2] // PATCH)

    def geometry(self, transformer: Config, vae: Config | None) -> tuple[int, ...]:
        check_still(type(self).__name__, self.frames)
        if transformer["guidance_embeds"] and self.guidance is None:
            raise ValueError(
                "guidance=None, but this transformer embeds a guidance scale: give a number, 3.5 as released"
            )
        if not transformer["guidance_embeds"] and self.guidance is not None:
            raise ValueError(f"guidance={self.guidance}, but this transformer embeds none: set guidance: null")
        channels = check_channels(transformer, vae, "latent_channels", per_token=PATCH**2)
        rows, columns = (check_multiple(s, getattr(self, s), image_scale(vae) * PATCH) for s in ("height", "width"))
        return (channels, rows * PATCH, columns * PATCH)

    def drawing(self) -> dict[str, Any]:
        """``guidance`` is the embedded scale; 1 where the model embeds none."""
        return super().drawing() | {"guidance": 1.0 if self.guidance is None else self.guidance}

    def _redraw(self, changes: Mapping[str, Any], restore: bool = False) -> None:
        others = dict(changes)
        if self.guidance is not None and "guidance" in others:
            self.guidance = _check_guidance(others.pop("guidance"))
        super()._redraw(others, restore)

    def velocity(self, latents: Tensor, sigma: Tensor, text: dict[str, Tensor]) -> Tensor:
        _, _, height, width = latents.shape
        tokens = self.transformer(
            hidden_states=pack(latents),
            timestep=sigma,
            guidance=None if self.guidance is None else torch.full_like(sigma, self.guidance),
            encoder_hidden_states=text["text"],
            pooled_projections=text["pooled"],
            txt_ids=torch.zeros(text["text"].shape[1], 3, device=latents.device, dtype=torch.float32),
            img_ids=positions(height // PATCH, width // PATCH, latents.device),
            return_dict=False,
        )[0]
        return unpack(tokens, height, width)

    def unscale(self, latents: Tensor) -> Tensor:
        return latents / self._vae.config.scaling_factor + self._vae.config.shift_factor


def _check_guidance(guidance: float | None) -> float | None:
    if guidance is not None and not (math.isfinite(guidance) and guidance >= 0):
        raise ValueError(
            f"guidance={guidance}: give a finite number of at least 0, or null for a model that embeds none"
        )
    return guidance


def pack(latents: Tensor) -> Tensor:
    """``[N, C, H, W]`` -> tokens ``[N, H/2 * W/2, 4 C]``, row by row; a token's channels run over C, then its 2 x 2."""
    n, c, h, w = latents.shape
    patches = latents.reshape(n, c, h // PATCH, PATCH, w // PATCH, PATCH)
    return patches.permute(0, 2, 4, 1, 3, 5).reshape(n, (h // PATCH) * (w // PATCH), c * PATCH**2)


def unpack(tokens: Tensor, height: int, width: int) -> Tensor:
    """Inverse of :func:`pack` for latents of ``height`` x ``width``."""
    n, _, channels = tokens.shape
    patches = tokens.reshape(n, height // PATCH, width // PATCH, channels // PATCH**2, PATCH, PATCH)
    return patches.permute(0, 3, 1, 4, 2, 5).reshape(n, channels // PATCH**2, height, width)


def positions(rows: int, columns: int, device: torch.device) -> Tensor:
    """``[rows * columns, 3]`` fp32: ``(0, row, column)`` of every image token."""
    row = torch.arange(rows, device=device, dtype=torch.float32).repeat_interleave(columns)
    column = torch.arange(columns, device=device, dtype=torch.float32).repeat(rows)
    return torch.stack([torch.zeros_like(row), row, column], dim=1)

"""Stable Diffusion 3 / 3.5 (Esser et al. 2024, arXiv 2403.03206) on diffusers' ``SD3Transformer2DModel``.

Text: two CLIP encoders side by side (77 tokens, the penultimate layers), padded in width and followed by T5 along the
tokens; the pooled CLIP vectors modulate the blocks. A latent is ``[16, H/8, W/8]``. Guidance is ``policies.guidance``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
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
from lightning_modules.policies.text import PipelineText


class SD3Text(PipelineText):
    """CLIP-L, CLIP-G and T5: ``text [N, 77 + L, D]``, ``pooled [N, P]``."""

    components = {
        "tokenizer": "CLIPTokenizer", "text_encoder": "CLIPTextModelWithProjection",
        "tokenizer_2": "CLIPTokenizer", "text_encoder_2": "CLIPTextModelWithProjection",
        "tokenizer_3": "T5Tokenizer", "text_encoder_3": "T5EncoderModel",
    }  # fmt: skip

    def __call__(self, prompts: Sequence[str], max_sequence_length: int, device: torch.device) -> dict[str, Tensor]:
        text, _, pooled, _ = self.pipeline.encode_prompt(
            list(prompts), None, None, device, do_classifier_free_guidance=False, max_sequence_length=max_sequence_length
        )  # fmt: skip
        return {"text": text, "pooled": pooled}


class SD3Policy(DiffusersPolicy):
    """Text to image. Size: multiples of 16 (VAE 8 x patch 2), up to the position table's 6,144 pixels a side (SD3.5-M)."""

    pipeline_class, transformer_class, vae_class = StableDiffusion3Pipeline, SD3Transformer2DModel, AutoencoderKL
    text_class = SD3Text
    default_lora = LoRA(
        rank=32,
        alpha=64,
        targets=(
            "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
            "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
        ),
    )  # fmt: skip
    """FlowGRPO's (arXiv 2505.05470): the joint attention's projections."""
    default_max_sequence_length = 256

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
    ) -> SD3Policy:
        """Load ``path``, a hub id or a local folder of a ``StableDiffusion3Pipeline``.

        Args:
            variant, revision: of the files, as on the hub; ``None``: the default ones.
            dtype: of transformer and text encoders: ``float32``, ``bfloat16``, ``float16``. Adapters have their own.
            height, width, options: as for the class.

        Errors: ``ValueError``, before weights are read where possible: see ``policies.loading``.
        """
        parts = load_parts(
            SD3Policy, path, variant=variant, revision=revision, dtype=dtype, height=height, width=width, **options
        )
        return SD3Policy(
            transformer=parts.transformer, text=parts.text, vae=parts.vae, height=height, width=width, **options
        )

    @property
    def num_tokens(self) -> int:
        patch = self.transformer.config.patch_size
        return (self.latent_shape[1] // patch) * (self.latent_shape[2] // patch)

    def geometry(self, transformer: Config, vae: Config | None) -> tuple[int, ...]:
        check_still(type(self).__name__, self.frames)
        channels = check_channels(transformer, vae, "latent_channels")
        factor, patch = image_scale(vae), transformer["patch_size"]
        tokens = {side: check_multiple(side, getattr(self, side), factor * patch) for side in ("height", "width")}
        for side, count in tokens.items():
            if count > transformer["pos_embed_max_size"]:
                largest = transformer["pos_embed_max_size"] * factor * patch
                raise ValueError(f"{side}={getattr(self, side)} exceeds the model's position table: at most {largest}")
        return (channels, tokens["height"] * patch, tokens["width"] * patch)

    def velocity(self, latents: Tensor, sigma: Tensor, text: dict[str, Tensor]) -> Tensor:
        return self.transformer(
            hidden_states=latents,
            timestep=1000.0 * sigma,
            encoder_hidden_states=text["text"],
            pooled_projections=text["pooled"],
            return_dict=False,
        )[0]

    def unscale(self, latents: Tensor) -> Tensor:
        return latents / self._vae.config.scaling_factor + self._vae.config.shift_factor


def image_scale(vae: Config | None) -> int:
    """Pixels per latent of an ``AutoencoderKL``: its blocks but one halve the size. 8 where none is given.

    Errors: ``ValueError`` if it does not say how its latents are shifted: it is of an older family.
    """
    if vae is None:
        return 8
    if vae["shift_factor"] is None:
        raise ValueError(
            "the VAE has no shift_factor in its config: give the one that the transformer was trained with"
        )
    return 2 ** (len(vae["block_out_channels"]) - 1)

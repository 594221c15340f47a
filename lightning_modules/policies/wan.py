"""Wan 2.1 and Wan 2.2 TI2V-5B, text to video (Wan Team 2025, arXiv 2503.20314), on diffusers' ``WanTransformer3DModel``.

Text: umT5; embeddings of padding are zero. A latent is ``[C, (F - 1)/4 + 1, H/8, W/8]`` (TI2V-5B: H/16, W/16): the VAE is
causal in time, its first latent frame stands for one frame and every other for four. One frame makes an image, as a video
of length 1. The model is conditioned on the continuous timestep, where the released UniPC sampler truncates it to an
integer. TI2V-5B takes one timestep per token; in text-to-video all are equal, so one per sample says the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
from diffusers.models.transformers.transformer_wan import WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import WanPipeline
from torch import Tensor

from lightning_modules.policies.diffusers_base import Config, DiffusersPolicy, check_channels, check_multiple
from lightning_modules.policies.loading import load_parts
from lightning_modules.policies.lora import LoRA
from lightning_modules.policies.text import PipelineText

WAN21_VAE = {"scale_factor_spatial": 8, "scale_factor_temporal": 4}


class WanText(PipelineText):
    """umT5: ``text [N, L, D]``."""

    components = {"tokenizer": "T5Tokenizer", "text_encoder": "UMT5EncoderModel"}

    def __call__(self, prompts: Sequence[str], max_sequence_length: int, device: torch.device) -> dict[str, Tensor]:
        text, _ = self.pipeline.encode_prompt(
            list(prompts), do_classifier_free_guidance=False, max_sequence_length=max_sequence_length, device=device
        )
        return {"text": text}


class WanPolicy(DiffusersPolicy):
    """Text to video ``[N, 3, F, H, W]``. Size: multiples of 16 (VAE 8 x patch 2), of 32 for TI2V-5B; ``F = 4 k + 1``."""

    pipeline_class, transformer_class, vae_class = WanPipeline, WanTransformer3DModel, AutoencoderKLWan
    text_class = WanText
    default_lora = LoRA(rank=32, alpha=64, targets=("to_q", "to_k", "to_v", "to_out.0"))
    """FlowGRPO's (arXiv 2505.05470): the projections of self- and cross-attention."""
    default_max_sequence_length = 512

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
    ) -> WanPolicy:
        """Load ``path``, a hub id or a local folder of a ``WanPipeline`` with one transformer.

        Args:
            variant, revision: of the files, as on the hub; ``None``: the default ones.
            dtype: of transformer and text encoder: ``float32``, ``bfloat16``, ``float16``. Adapters have their own.
            height, width, options: as for the class.

        Errors: ``ValueError``, before weights are read where possible: see ``policies.loading``.
        """
        parts = load_parts(
            WanPolicy, path, variant=variant, revision=revision, dtype=dtype, height=height, width=width, **options
        )
        return WanPolicy(
            transformer=parts.transformer, text=parts.text, vae=parts.vae, height=height, width=width, **options
        )

    @classmethod
    def check_index(cls, path: str, index: Config) -> None:
        if (index.get("transformer_2") or [None, None])[1] is not None:
            raise ValueError(
                f"{path} has two experts (transformer and transformer_2, Wan2.2 A14B), which is not supported: use "
                "Wan2.1 T2V (1.3B, 14B) or Wan2.2 TI2V-5B"
            )

    @property
    def num_tokens(self) -> int:
        _, frames, height, width = self.latent_shape
        time, rows, columns = self.transformer.config.patch_size
        return (frames // time) * (height // rows) * (width // columns)

    def geometry(self, transformer: Config, vae: Config | None) -> tuple[int, ...]:
        channels = check_channels(transformer, vae, "z_dim")
        scale = WAN21_VAE if vae is None else vae
        space, time = scale["scale_factor_spatial"], scale["scale_factor_temporal"]
        _, *patch = transformer["patch_size"]
        if self.frames < 1 or self.frames % time != 1:
            low = max(self.frames - 1, 0) // time * time + 1
            raise ValueError(f"frames={self.frames} is not {time} k + 1: choose {low} or {low + time}")
        rows, columns = (
            check_multiple(side, getattr(self, side), space * p) * p
            for side, p in zip(("height", "width"), patch, strict=True)
        )
        return (channels, (self.frames - 1) // time + 1, rows, columns)

    def velocity(self, latents: Tensor, sigma: Tensor, text: dict[str, Tensor]) -> Tensor:
        return self.transformer(
            hidden_states=latents, timestep=1000.0 * sigma, encoder_hidden_states=text["text"], return_dict=False
        )[0]

    def unscale(self, latents: Tensor) -> Tensor:
        mean, std = (
            torch.tensor(values, device=latents.device, dtype=latents.dtype).view(1, -1, 1, 1, 1)
            for values in (self._vae.config.latents_mean, self._vae.config.latents_std)
        )
        return latents * std + mean

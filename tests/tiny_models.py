"""Random components of the real families, small enough for a CPU: SD3, FLUX, Wan 2.1 and Wan 2.2 (TI2V-5B's layout).

Each family keeps what is particular to it: three text encoders, dual attention and q/k norms (SD3); packed latents,
rotary positions and a guidance embedding (FLUX); causal video VAE, masked text (Wan); residual VAE with patches and
per-token timesteps (Wan 2.2). Sizes in pixels must be multiples of ``SIZE[family]``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLWan,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
    WanPipeline,
    WanTransformer3DModel,
)
from torch import nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5Tokenizer,
    UMT5Config,
    UMT5EncoderModel,
)

from lightning_modules.policies.diffusers_base import DiffusersPolicy
from lightning_modules.policies.flux import FluxPolicy
from lightning_modules.policies.lora import LoRA
from lightning_modules.policies.sd3 import SD3Policy
from lightning_modules.policies.wan import WanPolicy

FAMILIES = ("sd3", "flux", "wan21", "wan22")
SIZE = {"sd3": 4, "flux": 4, "wan21": 16, "wan22": 32}
"""What height and width must be a multiple of, pixels."""
PROMPTS = ("a red circle", "two blue squares left of a ring", "cross")
WORDS = ["a", "red", "blue", "green", "circle", "square", "squares", "ring", "cross", "two", "left", "of"]
TOKENS = 12
"""Longest prompt of the T5 encoders, tokens."""
CLIP_TOKENS = 36
"""Longest prompt of the CLIP encoders, tokens: letters."""


def seeded(make: Callable[..., Any]) -> Callable[..., Any]:
    """Build with its own random stream: the same arguments give the same weights, and the caller's stream is untouched."""

    @functools.wraps(make)
    def build(*args: Any, seed: int = 0, **options: Any) -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            made = make(*args, **options)
            for module in made.values() if isinstance(made, dict) else [made]:
                if isinstance(module, nn.Module):
                    _enliven(module.eval())
        return made

    return build


@torch.no_grad()
def _enliven(module: nn.Module) -> None:
    """Random values wherever an initialisation is all zeros or ones, so that every part of the network does something."""
    for parameter in module.parameters():
        if parameter.numel() > 1 and parameter.max() == parameter.min():
            parameter.add_(torch.randn(parameter.shape) * 0.1)


def clip_tokenizer() -> CLIPTokenizer:
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    pieces = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{x}</w>" for x in letters)]
    return CLIPTokenizer({p: i for i, p in enumerate(pieces)}, [], model_max_length=CLIP_TOKENS)


def t5_tokenizer() -> T5Tokenizer:
    pieces = ["<pad>", "</s>", "<unk>", "▁", *(f"▁{w}" for w in WORDS)]
    return T5Tokenizer([(p, -float(i)) for i, p in enumerate(pieces)], extra_ids=0, model_max_length=512)


@seeded
def clip_encoder(kind: type = CLIPTextModelWithProjection, width: int = 8) -> nn.Module:
    config = CLIPTextConfig(
        vocab_size=54, hidden_size=width, intermediate_size=16, projection_dim=width, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=CLIP_TOKENS, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    return kind(config)


@seeded
def t5_encoder(kind: type = T5EncoderModel, width: int = 24) -> nn.Module:
    config = {T5EncoderModel: T5Config, UMT5EncoderModel: UMT5Config}[kind](
        vocab_size=16, d_model=width, d_kv=8, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.5,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return kind(config)


@seeded
def image_vae() -> AutoencoderKL:
    return AutoencoderKL(
        block_out_channels=(4, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1, latent_channels=4, norm_num_groups=2, sample_size=16, use_quant_conv=False,
        use_post_quant_conv=False, scaling_factor=1.5305, shift_factor=0.0609,
    )  # fmt: skip


@seeded
def video_vae(version: str = "wan21") -> AutoencoderKLWan:
    options: dict[str, Any] = {}
    if version == "wan22":
        options = {
            "is_residual": True,
            "patch_size": 2,
            "in_channels": 12,
            "out_channels": 12,
            "scale_factor_spatial": 16,
        }
    return AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[-0.7, 0.3, 0.1, -0.2], latents_std=[2.8, 1.4, 0.9, 1.7], **options,
    )  # fmt: skip


@seeded
def sd3_transformer(**options: Any) -> SD3Transformer2DModel:
    defaults = {
        "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
        "num_attention_heads": 2, "joint_attention_dim": 24, "caption_projection_dim": 16, "pooled_projection_dim": 16,
        "pos_embed_max_size": 8, "dual_attention_layers": (0,), "qk_norm": "rms_norm",
    }  # fmt: skip
    return SD3Transformer2DModel(**(defaults | options))


@seeded
def flux_transformer(**options: Any) -> FluxTransformer2DModel:
    defaults = {
        "in_channels": 16, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
        "joint_attention_dim": 24, "pooled_projection_dim": 8, "guidance_embeds": True, "axes_dims_rope": (2, 2, 4),
    }  # fmt: skip
    return FluxTransformer2DModel(**(defaults | options))


@seeded
def wan_transformer(**options: Any) -> WanTransformer3DModel:
    defaults = {
        "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4, "text_dim": 24,
        "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "rope_max_seq_len": 32,
    }  # fmt: skip
    return WanTransformer3DModel(**(defaults | options))


TRANSFORMERS: dict[str, Callable[..., Any]] = {
    "sd3": sd3_transformer, "flux": flux_transformer, "wan21": wan_transformer, "wan22": wan_transformer,
}  # fmt: skip


def scheduler(family: str) -> FlowMatchEulerDiscreteScheduler:
    """As released with SD3.5 (shift 3) and FLUX.1-dev (dynamic shift); for Wan, flow-match Euler with shift 3."""
    if family == "flux":
        return FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True,
            base_shift=0.5,
            max_shift=1.15,
            base_image_seq_len=256,
            max_image_seq_len=4096,
            shift=3.0,
        )
    return FlowMatchEulerDiscreteScheduler(shift=3.0)


def components(family: str, **transformer: Any) -> dict[str, Any]:
    """Everything the family's diffusers pipeline is made of; further arguments go to the transformer."""
    parts = {"transformer": TRANSFORMERS[family](**transformer), "scheduler": scheduler(family)}
    if family == "sd3":
        return parts | {
            "vae": image_vae(),
            "tokenizer": clip_tokenizer(), "text_encoder": clip_encoder(),
            "tokenizer_2": clip_tokenizer(), "text_encoder_2": clip_encoder(seed=1),
            "tokenizer_3": t5_tokenizer(), "text_encoder_3": t5_encoder(),
        }  # fmt: skip
    if family == "flux":
        return parts | {
            "vae": image_vae(),
            "tokenizer": clip_tokenizer(), "text_encoder": clip_encoder(CLIPTextModel),
            "tokenizer_2": t5_tokenizer(), "text_encoder_2": t5_encoder(),
        }  # fmt: skip
    return parts | {
        "vae": video_vae(family),
        "tokenizer": t5_tokenizer(), "text_encoder": t5_encoder(UMT5EncoderModel),
        "expand_timesteps": family == "wan22",
    }  # fmt: skip


def pipeline(family: str, **parts: Any) -> DiffusionPipeline:
    """The family's diffusers pipeline, silent; ``parts`` replace components."""
    kind = {"sd3": StableDiffusion3Pipeline, "flux": FluxPipeline}.get(family, WanPipeline)
    pipe = kind(**(components(family) | parts))
    pipe.set_progress_bar_config(disable=True)
    return pipe


POLICIES: dict[str, type[DiffusersPolicy]] = {
    "sd3": SD3Policy,
    "flux": FluxPolicy,
    "wan21": WanPolicy,
    "wan22": WanPolicy,
}


def size(family: str, frames: int = 1) -> dict[str, int]:
    """Height, width (different ones) and frames of a small picture of the family; ``frames`` counts for Wan alone."""
    video = {"frames": frames} if family.startswith("wan") else {}
    return {"height": 2 * SIZE[family], "width": 3 * SIZE[family]} | video


def tiny_lora(family: str, **options: Any) -> LoRA:
    """The family's canonical targets at a rank of 2, with alpha != rank."""
    return LoRA(**({"rank": 2, "alpha": 6, "targets": POLICIES[family].default_lora.targets} | options))


@functools.cache
def _frozen(family: str) -> Any:
    """One set of encoders and VAE for all policies: nothing changes them."""
    return pipeline(family)


def policy(family: str, pipe: Any = None, **options: Any) -> DiffusersPolicy:
    """A policy on the components of ``pipe``, by default on a transformer of its own; ``options`` as for the class.
    Adapters are tiny ones."""
    kind, transformer = POLICIES[family], TRANSFORMERS[family]() if pipe is None else pipe.transformer
    pipe = pipe or _frozen(family)
    if options.get("trainable", "lora") == "lora":
        options.setdefault("lora", tiny_lora(family))
    defaults = size(family) | {"max_sequence_length": TOKENS}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return kind(transformer=transformer, text=kind.text_class(pipe), vae=pipe.vae, **(defaults | options))


@torch.no_grad()
def move(policy: nn.Module, by: float = 0.05, seed: int = 0) -> None:
    """Push everything trainable in a random direction, as training would: adapters no longer add zero."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(by * torch.randn(parameter.shape, generator=generator).to(parameter))

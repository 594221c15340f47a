"""What every policy on diffusers' components shares: frozen parts, what is trained, text on its device, decoding.

A family (``sd3``, ``flux``, ``wan``) adds its geometry, its call of the transformer and its latents' scaling. From YAML,
a policy of random or hand-made components is ``class_path: ...SD3Policy``, a pretrained one
``class_path: ...SD3Policy.from_pretrained`` with the path and all options of the class in ``init_args``.

Precision: the latents come and the velocity leaves in the latents' dtype; between them the transformer works in the dtype
of its weights (or of autocast), conditioned on the continuous timestep ``1000 sigma`` in fp32. Text encoders and VAE run
in their own dtype, outside autocast.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Literal

import torch
from diffusers.models.modeling_utils import ModelMixin
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor, nn

from lightning_modules.policies.activation_checkpointing import set_activation_checkpointing
from lightning_modules.policies.base import FrozenParts, Policy, Reference
from lightning_modules.policies.lora import LoRA, adapter_layers, inject
from lightning_modules.policies.reference import reference_of
from lightning_modules.policies.text import PipelineText, TextEncoder
from lightning_modules.policies.text_cache import EmbeddingCache
from lightning_modules.types import Conditioning

Config = Mapping[str, Any]
TextDevice = Literal["cpu", "offload", "policy"]
LONGEST_TEXT = 512
"""Tokens of a prompt that the models were trained with at most; diffusers' SD3 and FLUX pipelines refuse more."""


class DiffusersPolicy(Policy):
    """A diffusers transformer as a policy.

    Args:
        transformer: the backbone, the only child; of the family's class, without adapters.
        text: frozen text encoders; ``None`` if :meth:`encode` is never called.
        vae: frozen VAE; ``None`` if :meth:`decode` is never called (the released models' scale factors are then assumed).
        height, width: of the images, pixels; multiples of what the family's VAE and patches need.
        frames: of the video; 1 for an image.
        trainable: ``lora`` trains adapters, ``full`` every weight of the transformer.
        lora: what to adapt; ``None``: the family's canonical adapters.
        activation_checkpointing: recompute activations in the backward.
        compile: ``torch.compile`` the transformer.
        decode_batch: latents decoded at a time; ``None``: all at once.
        vae_slicing, vae_tiling: decode one by one; decode in overlapping tiles (approximate).
        embedding_cache: folder for text embeddings; ``None``: encode every time.
        text_device: ``cpu``: encoders stay there; ``offload``: on the policy's device only while they encode;
            ``policy``: on the policy's device.
        max_sequence_length: tokens of the long text encoder, at most :data:`LONGEST_TEXT`; ``None``: the family's.

    Errors: ``ValueError`` naming the argument and the remedy.
    """

    pipeline_class: ClassVar[type[DiffusionPipeline]]
    transformer_class: ClassVar[type[ModelMixin]]
    vae_class: ClassVar[type[ModelMixin]]
    text_class: ClassVar[type[PipelineText]]
    default_lora: ClassVar[LoRA]
    """Canonical adapters of the family."""
    default_max_sequence_length: ClassVar[int]

    def __init__(
        self,
        *,
        transformer: nn.Module,
        text: TextEncoder | None,
        vae: nn.Module | None,
        height: int,
        width: int,
        frames: int = 1,
        trainable: Literal["lora", "full"] = "lora",
        lora: LoRA | None = None,
        activation_checkpointing: bool = False,
        compile: bool = False,
        decode_batch: int | None = None,
        vae_slicing: bool = False,
        vae_tiling: bool = False,
        embedding_cache: str | None = None,
        text_device: TextDevice = "cpu",
        max_sequence_length: int | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(transformer, self.transformer_class):
            raise ValueError(
                f"transformer is a {type(transformer).__name__}, {type(self).__name__} needs a "
                f"{self.transformer_class.__name__}"
            )
        _check_options(trainable, lora, decode_batch, text_device, max_sequence_length)
        if vae is not None and not isinstance(vae, self.vae_class):
            raise ValueError(f"vae is a {type(vae).__name__}, {type(self).__name__} needs a {self.vae_class.__name__}")
        self.height, self.width, self.frames = height, width, frames
        vae_config: Any = None if vae is None else vae.config
        self._latent_shape = self.geometry(transformer.config, vae_config)
        self.lora = (lora or self.default_lora) if trainable == "lora" else None
        self.decode_batch, self.text_device, self.text = decode_batch, text_device, text
        self.max_sequence_length = max_sequence_length or self.default_max_sequence_length
        self.frozen = FrozenParts(**({} if text is None else text.modules), **({} if vae is None else {"vae": vae}))
        if vae is not None:
            _switch_on(vae, slicing=vae_slicing, tiling=vae_tiling)
        self._cache = None
        if embedding_cache is not None and text is not None:
            self._cache = EmbeddingCache(embedding_cache, f"{text.identity()} {self.max_sequence_length} tokens")
        self.transformer = transformer
        if self.lora is None:
            if adapter_layers(transformer):
                raise ValueError(
                    f"trainable='full' on a {type(transformer).__name__} with adapters: fuse them into the weights first"
                )
            transformer.requires_grad_(True)
        else:
            inject(transformer, self.lora)
        set_activation_checkpointing(transformer, activation_checkpointing)
        if compile:
            transformer.compile()

    # what a family says of itself

    @classmethod
    def check_index(cls, path: str, index: Config) -> None:
        """Look at ``model_index.json``. Errors: ``ValueError`` if the repository is no model of this family."""

    @abstractmethod
    def geometry(self, transformer: Config, vae: Config | None) -> tuple[int, ...]:
        """Latent shape for the policy's size. Errors: ``ValueError`` naming the size that does not fit, and one that does;
        if transformer and VAE do not fit each other."""

    @abstractmethod
    def velocity(self, latents: Tensor, sigma: Tensor, text: dict[str, Tensor]) -> Tensor:
        """The transformer's own call, in its own dtype: ``latents [N, *latent]``, ``sigma [N]`` at least fp32."""

    @abstractmethod
    def unscale(self, latents: Tensor) -> Tensor:
        """Latents as the transformer sees them -> as the VAE does."""

    # the contract

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self._latent_shape

    def forward(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        dtype = self.transformer.dtype
        text = {name: tensor.to(dtype) for name, tensor in conditioning.tensors.items()}
        return self.velocity(latents.to(dtype), sigma, text).to(latents.dtype)

    @torch.inference_mode(False)
    @torch.no_grad()
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """As the contract says; the embeddings keep the encoders' dtype. Errors: ``ValueError`` without encoders or prompts."""
        if not prompts:
            raise ValueError("no prompts to encode: give at least one, an empty one for no text")
        embed = self._embed
        tensors = embed(list(prompts)) if self._cache is None else self._cache(prompts, embed)
        return Conditioning(tensors=tensors).to(self.device)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """As the contract says, ``decode_batch`` latents at a time. Errors: ``ValueError`` without a VAE."""
        with torch.inference_mode(False):  # where validation runs, a moved weight could never be moved again
            vae = self._vae.to(latents.device)
        size = self.decode_batch or len(latents)
        with own_precision(latents.device):
            parts = [self.unscale(part.to(vae.dtype)) for part in latents.split(size)]
            return torch.cat([_to_images(vae.decode(part, return_dict=False)[0]) for part in parts])

    def reference(self) -> Reference:
        """Adapters off, or a frozen copy of the transformer."""
        return reference_of(self)

    def identity(self) -> dict[str, Any]:
        """Also ``path`` and what is trained: ``full`` or the adapters."""
        config: Any = self.transformer.config
        trained = "full" if self.lora is None else f"{self.lora}"
        return super().identity() | {"path": config.get("_name_or_path") or None, "trained": trained}

    def drawing(self) -> dict[str, Any]:
        """Also ``frames``."""
        return super().drawing() | {"height": self.height, "width": self.width, "frames": self.frames}

    # the machinery

    def _redraw(self, changes: Mapping[str, Any], restore: bool = False) -> None:
        """Another size is another geometry; the rest is the family's."""
        self.height, self.width = changes.get("height", self.height), changes.get("width", self.width)
        vae: Any = getattr(self.frozen, "vae", None)
        self._latent_shape = self.geometry(self.transformer.config, None if vae is None else vae.config)
        if others := {name: value for name, value in changes.items() if name not in ("height", "width")}:
            super()._redraw(others, restore)

    def _embed(self, prompts: list[str]) -> dict[str, Tensor]:
        if self.text is None:
            raise ValueError(f"{type(self).__name__} has no text encoders: give text")
        device = torch.device("cpu") if self.text_device == "cpu" else self.device
        self.text.to(device)
        with own_precision(device):
            tensors = self.text(prompts, self.max_sequence_length, device)
        if self.text_device == "offload":
            self.text.to("cpu")
        return tensors

    @property
    def _vae(self) -> Any:
        try:
            return self.frozen.vae
        except AttributeError:
            raise ValueError(f"{type(self).__name__} has no VAE to decode with: give vae") from None

    def _apply(self, fn: Any, recurse: bool = True) -> DiffusersPolicy:
        """Keep in fp32 what the model's class keeps there (rotary frequencies, norms) and fp32 adapters, whatever the trainer
        casts the rest to: rounded to bf16, the positions of a video would run together, and small updates be lost."""
        kept = {id(tensor) for _, tensor in self._kept_in_fp32()}

        def apply(tensor: Tensor) -> Tensor:
            if id(tensor) in kept:
                sample = fn(torch.empty(0, dtype=tensor.dtype, device=tensor.device))
                if sample.dtype.itemsize < tensor.dtype.itemsize:
                    return tensor.to(sample.device)
            return fn(tensor)

        return super()._apply(apply, recurse)

    def _kept_in_fp32(self) -> Iterator[tuple[str, Tensor]]:
        keep = set(getattr(self.transformer, "_keep_in_fp32_modules", None) or ())
        if self.lora is not None and self.lora.dtype == "float32":
            keep |= {"lora_A", "lora_B"}
        for tensors in (self.transformer.named_parameters(), self.transformer.named_buffers()):
            yield from ((name, t) for name, t in tensors if keep & set(name.split(".")) and not t.is_meta)


@contextmanager
def own_precision(device: torch.device) -> Iterator[None]:
    """Frozen networks compute in the dtype of their weights: no autocast, and fp32 for what they create themselves."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        torch.set_default_dtype(default)


def check_multiple(name: str, value: int, multiple: int) -> int:
    """``value // multiple``. Errors: ``ValueError`` naming the nearest sizes that fit."""
    if value < multiple or value % multiple:
        low = max(value // multiple, 1) * multiple
        raise ValueError(f"{name}={value} is no multiple of {multiple}: choose {low} or {low + multiple}")
    return value // multiple


def check_channels(transformer: Config, vae: Config | None, of_vae: str, *, per_token: int = 1) -> int:
    """Channels of a latent; ``of_vae`` is the VAE's name for them. The transformer sees ``per_token`` times as many.

    Errors: ``ValueError`` if it gives back others than it takes, or the VAE has another number.
    """
    taken = transformer["in_channels"]
    given = transformer.get("out_channels") or taken
    if given != taken:
        raise ValueError(
            f"the transformer takes {taken} channels and gives {given}, so it wants more than noise and text: give that of a "
            "text-to-image or text-to-video model"
        )
    channels = taken // per_token
    if vae is not None and vae[of_vae] != channels:
        raise ValueError(
            f"the transformer's latents have {channels} channels and the VAE's {vae[of_vae]}: give the VAE that the "
            "transformer was trained with"
        )
    return channels


def check_still(policy: str, frames: int) -> None:
    """Errors: ``ValueError`` if an image model is asked for more than one frame."""
    if frames != 1:
        raise ValueError(f"frames={frames}: {policy} makes images; set frames: 1, or use a video policy")


def _check_options(
    trainable: str, lora: LoRA | None, decode_batch: int | None, text_device: str, max_sequence_length: int | None
) -> None:
    if trainable not in ("lora", "full"):
        raise ValueError(f"trainable={trainable!r}: choose lora or full")
    if trainable == "full" and lora is not None:
        raise ValueError(f"lora={lora} with trainable='full': set trainable: lora, or lora: null")
    if decode_batch is not None and decode_batch < 1:
        raise ValueError(f"decode_batch={decode_batch}: give at least 1, or null for all at once")
    if text_device not in ("cpu", "offload", "policy"):
        raise ValueError(f"text_device={text_device!r}: choose cpu, offload or policy")
    if max_sequence_length is not None and max_sequence_length < 1:
        raise ValueError(f"max_sequence_length={max_sequence_length}: give at least 1, or null for the family's")
    if max_sequence_length is not None and max_sequence_length > LONGEST_TEXT:
        raise ValueError(
            f"max_sequence_length={max_sequence_length}: choose at most {LONGEST_TEXT}, the models' longest text"
        )


def _to_images(decoded: Tensor) -> Tensor:
    """A VAE's output, nominally in [-1, 1] -> fp32 in [0, 1]."""
    return (decoded.float() / 2 + 0.5).clamp(0, 1)


def _switch_on(vae: Any, *, slicing: bool, tiling: bool) -> None:
    if slicing:
        vae.enable_slicing()
    if tiling:
        vae.enable_tiling()

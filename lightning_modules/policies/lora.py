"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685, section 4.1) on a diffusers transformer, by peft.

An adapted linear layer computes ``W x + b + (alpha / r) B A x`` with ``W``, ``b`` frozen, ``A [r, in]`` random and
``B [out, r]`` zero at the start: training starts from the base model, and switching the adapters off gives it back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from diffusers.models.modeling_utils import ModelMixin
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn

ADAPTER = "default"
"""peft's name of the adapter that is trained."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """What to adapt, and how.

    Errors: ``ValueError`` on a rank below 1, an alpha that is not positive, no targets, an unknown init or dtype.
    """

    rank: int
    """r, at least 1."""
    alpha: float
    """numerator of the scale ``alpha / r``."""
    targets: tuple[str, ...] | list[str]
    """linear layers to adapt, by their full names or by the last parts of them: ``to_q`` stands for every ``*.to_q``."""
    init: Literal["gaussian", "kaiming"] = "gaussian"
    """A's distribution: normal with standard deviation 1 / r, or peft's Kaiming-uniform. B is zero in both."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """what the adapters are kept in, whatever the base weights' dtype. In bf16 small updates are rounded away."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora rank={self.rank}: give an integer of at least 1")
        if not self.alpha > 0:
            raise ValueError(f"lora alpha={self.alpha}: give a positive number (alpha / rank scales the adapter)")
        if isinstance(self.targets, str) or not self.targets:
            raise ValueError(f"lora targets={self.targets!r}: give a list of layer names, for example ['to_q', 'to_v']")
        if self.init not in ("gaussian", "kaiming"):
            raise ValueError(
                f"lora init={self.init!r}: choose gaussian or kaiming; training has to start from the base model, whose "
                "weights stay as they are"
            )
        if self.dtype not in DTYPES:
            raise ValueError(f"lora dtype={self.dtype!r}: choose one of {', '.join(DTYPES)}")


def adapted_layers(transformer: nn.Module, targets: Sequence[str]) -> list[str]:
    """Full names of the linear layers that ``targets`` stand for, in the order of the model; weights are not looked at,
    so that a model on the ``meta`` device will do.

    Errors: ``ValueError`` naming every target that matches nothing, or something that is no linear layer.
    """
    modules = dict(transformer.named_modules())
    matches = {t: [name for name in modules if name == t or name.endswith(f".{t}")] for t in targets}
    unmatched = [t for t, names in matches.items() if not names]
    if unmatched:
        linear = sorted({_short(name) for name, module in modules.items() if isinstance(module, nn.Linear)})
        raise ValueError(
            f"lora targets {', '.join(unmatched)} match no layer of {type(transformer).__name__}; its linear layers "
            f"end in {', '.join(linear)}"
        )
    for target, names in matches.items():
        other = next((name for name in names if not isinstance(modules[name], nn.Linear)), None)
        if other is not None:
            kind = type(modules[other]).__name__
            raise ValueError(f"lora target {target!r} matches {other}, a {kind}: name the linear layers inside it")
    chosen = {name for names in matches.values() for name in names}
    return [name for name in modules if name in chosen]


def inject(transformer: ModelMixin, lora: LoRA) -> list[str]:
    """Freeze ``transformer``, add trainable adapters to it, return the full names of the adapted layers.

    Errors: as :func:`adapted_layers`; ``ValueError`` if it has adapters already. The transformer is then untouched.
    """
    if adapter_layers(transformer):
        raise ValueError(
            f"{type(transformer).__name__} has adapters already: fuse or unload them, and inject into the plain model"
        )
    names = adapted_layers(transformer, lora.targets)
    transformer.requires_grad_(False)
    transformer.add_adapter(  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]  (the families' peft mixin)
        LoraConfig(
            r=lora.rank,
            lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]  (only ever divided by r)
            target_modules=list(lora.targets),
            init_lora_weights="gaussian" if lora.init == "gaussian" else True,
        ),
        adapter_name=ADAPTER,
    )
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(DTYPES[lora.dtype])
    return names


def adapter_layers(module: nn.Module) -> list[BaseTunerLayer]:
    """The adapted layers inside ``module``; empty for a plain model."""
    return [part for part in module.modules() if isinstance(part, BaseTunerLayer)]


@contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Inside, every adapter in ``module`` is off and its layers compute the base model's values. Afterwards, also after an
    exception, each is on or off, and each parameter requires gradients or not, as before.

    Errors: ``ValueError`` if there are no adapters; ``RuntimeError`` if one cannot be switched off (merged into its base).
    """
    layers = adapter_layers(module)
    if not layers:
        raise ValueError(f"{type(module).__name__} has no adapters to switch off: train it with lora")
    were_on = [layer for layer in layers if not layer.disable_adapters]
    required_grad = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
    try:
        for layer in were_on:
            layer.enable_adapters(False)
        on = sum(layer.merged or not layer.disable_adapters for layer in layers)
        if on:
            raise RuntimeError(f"{on} of {len(layers)} adapters are still in effect: unmerge them before training")
        yield
    finally:
        for layer in were_on:
            layer.enable_adapters(True)
        for parameter, required in required_grad:  # enabling makes trainable what may have been frozen on purpose
            parameter.requires_grad_(required)


def starts_from_base(module: nn.Module) -> bool:
    """Whether every adapter in ``module`` adds exactly zero: its ``B`` is zero."""
    return not any(b.any() for layer in adapter_layers(module) for b in _up_projections(layer))


def _up_projections(layer: BaseTunerLayer) -> list[Tensor]:
    return [up.weight for up in layer.lora_B.values()]  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def _short(name: str) -> str:
    """Last parts of a layer's name, from the last one that is a word: ``blocks.0.attn.to_out.0`` -> ``to_out.0``."""
    parts = name.split(".")
    start = max((k for k, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(parts[start:])

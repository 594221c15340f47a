"""Adapters in diffusers' LoRA format: ``pytorch_lora_weights.safetensors`` with ``transformer.<layer>.lora_{A,B}.weight``,
and the configuration in its header.

A layer adds ``alpha / r * B A x``. A file whose header lacks alpha is read as alpha = r, so alpha always goes with it; the
header holds nothing else that an older peft might not know.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin, SD3LoraLoaderMixin, WanLoraLoaderMixin
from peft.utils.save_and_load import get_peft_model_state_dict

from lightning_modules.export.probe import Probe
from lightning_modules.policies.lora import ADAPTER, adapters_off

LOADERS: dict[str, Any] = {
    "SD3Transformer2DModel": SD3LoraLoaderMixin,
    "FluxTransformer2DModel": FluxLoraLoaderMixin,
    "WanTransformer3DModel": WanLoraLoaderMixin,
}
"""Class of the transformer -> the part of its pipeline that writes and reads LoRA files."""
_BESIDE = "exported"


def write_adapters(transformer: Any, folder: Path) -> None:
    """Write the trained adapters, in their dtype. Errors: ``ValueError`` if diffusers has no format for the transformer."""
    config = transformer.peft_config[ADAPTER]
    tensors = get_peft_model_state_dict(transformer, adapter_name=ADAPTER)
    _loader(transformer).save_lora_weights(
        folder,
        transformer_lora_layers={name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
        transformer_lora_adapter_metadata={
            "r": config.r, "lora_alpha": config.lora_alpha, "target_modules": sorted(config.target_modules),
        },
    )  # fmt: skip


def check_adapters(policy: Any, folder: Path) -> None:
    """Load the file beside the trained adapters: the velocities have to agree to 0.1 % of what the adapters do (the two
    computations are the same; only the order of additions on a GPU may differ). Errors: ``RuntimeError`` otherwise."""
    probe = Probe(policy)
    trained = probe(policy)
    with adapters_off(policy.transformer):
        base = probe(policy)
    with _loaded_beside(policy.transformer, folder):
        error = (probe(policy) - trained).norm().item()
    effect = (trained - base).norm().item()
    if not error <= 1e-3 * effect:
        raise RuntimeError(
            f"the exported adapters give a velocity {error:.3g} away from the trained one, which they move by {effect:.3g}: "
            "the installed diffusers and peft do not read what they wrote, or the weights are not finite; nothing is kept"
        )


@contextmanager
def _loaded_beside(transformer: Any, folder: Path) -> Iterator[None]:
    """Inside, the file's adapters are active in place of the trained ones; afterwards everything is as before."""
    required_grad = [(parameter, parameter.requires_grad) for parameter in transformer.parameters()]
    active = transformer.active_adapters()
    state, header = _loader(transformer).lora_state_dict(folder, return_lora_metadata=True, local_files_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # two adapters are meant here
            transformer.load_lora_adapter(state, metadata=header, adapter_name=_BESIDE, low_cpu_mem_usage=True)
        for name, parameter in transformer.named_parameters():
            if f".{_BESIDE}." in name:  # loading casts to the base weights' dtype, training may use a wider one
                parameter.data = state[f"transformer.{name.replace(f'.{_BESIDE}.', '.')}"].to(parameter.device)
        transformer.set_adapter(_BESIDE)
        yield
    finally:
        transformer.set_adapter(active)
        transformer.delete_adapters(_BESIDE)
        for parameter, required in required_grad:
            parameter.requires_grad_(required)


def _loader(transformer: Any) -> Any:
    kind = type(transformer).__name__
    if kind not in LOADERS:
        raise ValueError(f"diffusers has no LoRA format for {kind}: export one of {', '.join(LOADERS)}")
    return LOADERS[kind]

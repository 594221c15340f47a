"""A sharded policy's whole counterpart: a plain transformer of diffusers' own class, built empty from the same
configuration (and the same adapters) and given the gathered tensors, or none."""

from __future__ import annotations

import copy
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_modules.export.policy import backbone_of
from lightning_modules.parallel.checkpoints import gathered
from lightning_modules.policies.base import Policy
from lightning_modules.policies.lora import ADAPTER, adapter_layers


def gathered_policy(policy: Policy, keep: bool) -> Policy:
    """The same policy, whole on the CPU. A collective; ``policy`` is left alone.

    Args:
        keep: whether this rank wants the values; elsewhere its tensors are on the ``meta`` device.
    """
    return _with_tensors(policy, gathered(backbone_of(policy).transformer.state_dict(), keep=keep))


def on_meta(policy: Policy) -> Policy:
    """The same policy, whole and without values, to look at shapes and dtypes; no collective."""
    state = backbone_of(policy).transformer.state_dict()
    return _with_tensors(
        policy, {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in state.items()}
    )


def _with_tensors(policy: Policy, tensors: dict[str, Tensor]) -> Policy:
    transformer = backbone_of(policy).transformer
    return _with_transformer(policy, transformer, _rebuilt(transformer, tensors))


def _with_transformer(module: nn.Module, old: nn.Module, new: nn.Module) -> Any:
    """Copies of ``module``, and of the policies that it wraps, with ``new`` in the place of ``old`` and all else shared."""
    if module is old or not isinstance(module, Policy):
        return new if module is old else module
    other = copy.copy(module)
    other._modules = {name: _with_transformer(child, old, new) for name, child in module._modules.items() if child}
    return other


def _rebuilt(transformer: Any, tensors: dict[str, Tensor]) -> Any:
    """A transformer of its own with these tensors, in the dtypes that they have."""
    with torch.random.fork_rng(devices=[]), init_empty_weights(include_buffers=False):
        empty = original_class(transformer).from_config(transformer.config)
        if adapter_layers(transformer):
            empty.add_adapter(transformer.peft_config[ADAPTER], adapter_name=ADAPTER)
    trainable = {name: p.requires_grad for name, p in transformer.named_parameters()}
    on_cpu = {name: tensor if tensor.is_meta else tensor.cpu() for name, tensor in tensors.items()}
    empty.load_state_dict(on_cpu, strict=True, assign=True)
    for name, parameter in empty.named_parameters():
        parameter.requires_grad_(trainable[name])
    return empty.train(transformer.training)


def original_class(module: nn.Module) -> Any:
    """The class that ``fully_shard`` put its own in front of."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))

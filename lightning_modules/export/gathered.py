"""A sharded policy, whole again on the CPU of one rank: a plain transformer of diffusers' own class, built empty from the
same configuration (and the same adapters) and given the gathered tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule

from lightning_modules.export.policy import backbone_of
from lightning_modules.parallel.checkpoints import gathered
from lightning_modules.policies.base import Policy
from lightning_modules.policies.lora import ADAPTER, adapter_layers


def gathered_policy(policy: Policy, keep: bool) -> Policy:
    """The policy that holds the transformer, with a whole transformer on the CPU. A collective. ``policy`` is left alone.

    Args:
        keep: whether this rank wants it; elsewhere its tensors are on the ``meta`` device.
    """
    backbone = backbone_of(policy)
    tensors = gathered(backbone.transformer.state_dict(), keep=keep)
    whole = object.__new__(type(backbone))
    whole.__dict__.update(backbone.__dict__)
    whole._modules = {**backbone._modules, "transformer": _rebuilt(backbone.transformer, tensors)}
    return whole


def _rebuilt(transformer: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A transformer of its own with these tensors, in the dtypes that they have."""
    with torch.random.fork_rng(devices=[]):  # its initial values are drawn, and dropped
        empty = original_class(transformer).from_config(transformer.config)
        if adapter_layers(transformer):
            empty.add_adapter(transformer.peft_config[ADAPTER], adapter_name=ADAPTER)
    trainable = {name: p.requires_grad for name, p in transformer.named_parameters()}
    tensors = {name: tensor.cpu() if tensor.device.type != "meta" else tensor for name, tensor in tensors.items()}
    empty.load_state_dict(tensors, strict=True, assign=True)
    for name, parameter in empty.named_parameters():
        parameter.requires_grad_(trainable[name])
    return empty.train(transformer.training)


def original_class(module: torch.nn.Module) -> Any:
    """The class that ``fully_shard`` put its own in front of."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, FSDPModule))

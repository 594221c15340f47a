"""Sharding a policy over ranks by FSDP2 (``torch.distributed.fsdp.fully_shard``): its blocks one by one, then the rest of
its transformer. A forward then gathers a block's weights just before they are needed, and one unsharded block at a time is
all that a device must hold beside its shards, also while they are made.

Every unit is resharded after its forward, the outermost too, so that between calls a policy's parameters are always the
sharded ones. Encoders and VAE are no children of a policy and stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor


def shard(
    policy: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> None:
    """Shard ``policy`` in place, adapters and frozen weights alike; what is sharded already is left alone. Collective: all
    ranks take rank 0's values, whatever theirs were.

    Args:
        policy: a policy, a policy that wraps one, or its frozen copy; adapters are in place.
        mesh: 1-D, or 2-D (replicate, shard): replicated along the first dimension, sharded along the second.
        param_dtype: what weights are gathered and computed in; ``None``: as they are. Local gradients are accumulated in
            at least fp32 either way.
        cpu_offload: keep the shards on the CPU.

    Errors: ``ValueError`` if a unit's trainable parameters have several dtypes, or the transformer is compiled.
    """
    device = device_of(mesh)
    for root in roots(policy):
        if root._compiled_call_impl is not None:
            raise ValueError(
                f"a compiled {type(root).__name__} is not proven to work sharded: set the policy's compile to false, or use "
                "strategy ddp"
            )
        for unit in [*blocks(root), root]:
            if not isinstance(unit, FSDPModule):
                _take_over_from_first(unit, device)
                fully_shard(
                    unit, mesh=mesh, reshard_after_forward=True, mp_policy=_precision(unit, param_dtype),
                    offload_policy=CPUOffloadPolicy(pin_memory=device.type != "cpu") if cpu_offload else OffloadPolicy(),
                )  # fmt: skip
    _take_over_from_first(policy, device)  # what lies around the transformer


def roots(policy: nn.Module) -> list[nn.Module]:
    """The transformer of a policy (of a reference too); a policy without one is a root itself."""
    names = [name for name, _ in policy.named_modules() if name.rpartition(".")[2] == "transformer"]
    outermost = [name for name in names if not any(name.startswith(f"{other}.") for other in names)]
    return [policy.get_submodule(name) for name in outermost] or [policy]


def blocks(transformer: nn.Module) -> Iterator[nn.Module]:
    """Its repeated blocks: the members of the outermost module lists whose members are of one class."""
    for part in transformer.children():
        if not isinstance(part, nn.ModuleList):
            yield from blocks(part)
        elif len({type(member) for member in part}) == 1:
            yield from (member for member in part if any(True for _ in member.parameters()))


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank computes."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _precision(unit: nn.Module, param_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    """``reduce_dtype`` is where FSDP2 accumulates the local gradients of several backward calls; what is sent is decided
    by who reduces them. Inputs are not cast: a timestep in bf16 would be another timestep."""
    dtypes = {p.dtype for p in unit.parameters() if p.requires_grad and not isinstance(p, DTensor)}
    if len(dtypes) > 1:
        raise ValueError(
            f"{type(unit).__name__} has trainable parameters of {sorted(map(str, dtypes))}, which cannot be sharded "
            "together: load the policy in float32 with trainer.precision bf16-mixed, or train adapters"
        )
    wide = torch.promote_types(dtypes.pop(), torch.float32) if dtypes else torch.float32
    return MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=wide, cast_forward_inputs=False)


@torch.no_grad()
def _take_over_from_first(module: nn.Module, device: torch.device) -> None:
    """Give what is not sharded yet the values of rank 0, on ``device``."""
    for tensor in (*module.parameters(), *module.buffers()):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device).contiguous()
            dist.broadcast(tensor.data, src=0)

"""Sharding a policy over ranks by FSDP2 (``torch.distributed.fsdp.fully_shard``): its blocks one by one, then the rest of
its transformer. Forwards then gather a block's weights just before they are needed.

Every module is resharded after its forward, the outermost too, so that between calls a policy's parameters are always the
sharded ones. Encoders and VAE are no children of a policy and stay whole on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard


def shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = None,
    cpu_offload: bool = False,
) -> None:
    """Shard every trainable root inside ``module`` in place; what is sharded already is left alone. All ranks take rank
    0's values.

    Args:
        module: a policy (or its frozen copy).
        mesh: 1-D, or 2-D (replicate, shard): replicated along the first dimension, sharded along the second.
        param_dtype: what weights are gathered and computed in; ``None``: as they are.
        cpu_offload: keep the shards on the CPU.
    """
    _take_over_from_first(module)
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, cast_forward_inputs=False)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for root in roots(module):
        for part in [*blocks(root), root]:
            if not isinstance(part, FSDPModule):
                fully_shard(part, mesh=mesh, reshard_after_forward=True, mp_policy=policy, offload_policy=offload)


def roots(module: nn.Module) -> list[nn.Module]:
    """The outermost modules that can be sharded as a unit: the transformer of a diffusers policy."""
    found = [part for name, part in module.named_modules() if name.rpartition(".")[2] == "transformer"]
    return found or [module]


def blocks(transformer: nn.Module) -> Iterator[nn.Module]:
    """Its repeated blocks: the members of module lists that hold several modules with parameters of one class."""
    for part in transformer.children():
        if isinstance(part, nn.ModuleList) and len({type(member) for member in part}) == 1:
            yield from (member for member in part if any(True for _ in member.parameters()))


@torch.no_grad()
def _take_over_from_first(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        if not hasattr(tensor, "device_mesh") and tensor.device.type != "meta":
            dist.broadcast(tensor.detach(), src=0)

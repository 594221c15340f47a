"""Gradients of parameters sharded by FSDP2 (``torch.distributed.fsdp.fully_shard``): held whole and local, reduced when
they are corrected.

With gradient synchronisation off, FSDP2 leaves the local gradient of a parameter, of full size, on the unsharded
parameter behind it. No public name leads there; this module alone uses the private ones. A sum over the ranks that ends
up sharded is a DTensor of partial sums redistributed to the parameter's own placements: a reduce-scatter along the sharded
dimension of the mesh, an all-reduce along the replicated one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial
from torch.nn import Parameter

from lightning_modules.parallel.gradients import Gradient, LocalGradients, zeros_like_gradient
from lightning_modules.parallel.ranks import Ranks


class ShardedGradients(LocalGradients):
    """Reduces to shards.

    Args:
        parameters: the trainable ones (DTensors), in the same order on every rank.
        module: what ``fully_shard`` was applied to, or a module around it; its own synchronisation is switched off.
        ranks: who takes part.
        reduce_dtype: what is sent and added up; ``None``: as held, at least fp32.

    Errors: ``RuntimeError`` if this version of torch keeps gradients elsewhere; ``ValueError`` on a trainable parameter that
    is not sharded.
    """

    def __init__(
        self,
        parameters: Sequence[Parameter],
        module: nn.Module,
        ranks: Ranks,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(parameters)
        self.ranks, self.reduce_dtype = ranks, reduce_dtype
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(False, recurse=False)
        behind = _behind(module)
        if any(id(p) not in behind for p in self.parameters):
            raise ValueError("a trainable parameter lies outside the sharded modules: shard the whole transformer")
        self._behind = [behind[id(p)] for p in self.parameters]

    @contextmanager
    def into(self, buffer: Gradient) -> Iterator[None]:
        before = [_take(part) for part in self._behind]
        for part, held in zip(self._behind, buffer.tensors, strict=True):
            part.unsharded_accumulated_grad = held
        try:
            yield
        finally:
            for k, part in enumerate(self._behind):
                buffer.tensors[k] = _take(part)
                part.unsharded_accumulated_grad = before[k]

    @torch.no_grad()
    def reduce(self, total: Gradient) -> Gradient:
        present = self.present_anywhere(total, self.ranks)
        reduced = self.buffer()
        for k, here in enumerate(present):
            if here:
                part = zeros_like_gradient(total.tensors[k], self.parameters[k])
                total.tensors[k] = None
                reduced.tensors[k] = self._scatter(part, self.parameters[k])
        if any(present):
            self.traffic.reductions += 1
        total.clear()
        return reduced

    def _scatter(self, part: Tensor, parameter: Parameter) -> Tensor:
        """This rank's shard of the sum of every rank's ``part``."""
        assert isinstance(parameter, DTensor)
        wide = torch.promote_types(part.dtype, torch.float32)
        mesh = parameter.device_mesh
        sent = part.to(self.reduce_dtype or wide).contiguous()
        partial = DTensor.from_local(sent, mesh, [Partial("sum")] * mesh.ndim, run_check=False)
        self.traffic.sent(sent, collectives=mesh.ndim)
        return partial.redistribute(placements=parameter.placements).to_local().to(wide)

    @torch.no_grad()
    def deliver(self, reduced: Gradient) -> None:
        for p, part in zip(self.parameters, reduced.tensors, strict=True):
            assert isinstance(p, DTensor)
            p.grad = None if part is None else _like(part.to(p.dtype), p)
        reduced.clear()


def _like(shard: Tensor, parameter: DTensor) -> DTensor:
    shard = shard.to(parameter.to_local().device)
    return DTensor.from_local(
        shard,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _take(behind: Any) -> Tensor | None:
    """The local gradient behind a parameter, which is then without one."""
    accumulated, behind.unsharded_accumulated_grad = behind.unsharded_accumulated_grad, None
    fresh = getattr(behind, "_unsharded_param", None)
    if fresh is None or fresh.grad is None:
        return accumulated
    grad, fresh.grad = fresh.grad, None
    return grad if accumulated is None else accumulated.add_(grad)


def _behind(module: nn.Module) -> dict[int, Any]:
    """id of a sharded parameter -> FSDP2's record of it."""
    records: dict[int, Any] = {}
    try:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                state = part._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
                for group in filter(None, groups):
                    for record in group.fsdp_params:
                        _ = record.unsharded_accumulated_grad
                        records[id(record.sharded_param)] = record
    except AttributeError as error:
        raise RuntimeError(
            f"torch {torch.__version__} keeps the local gradients of FSDP2 elsewhere ({error}): use a version that this one "
            "was tested with (2.11 to 2.14), or DDP"
        ) from error
    return records

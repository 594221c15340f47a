"""Gradients of parameters sharded by FSDP2 (``torch.distributed.fsdp.fully_shard``): held whole and local, reduced to shards
once they are corrected.

With gradient synchronisation off, FSDP2 leaves the local gradient of a parameter, of full size, on the unsharded
parameter behind it or, added up over several backward calls, beside it. No public name leads there; this module alone uses
the private ones, and looks for each of them before a run starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lightning_modules.parallel.gradients import Gradient
from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.sharding import device_of
from lightning_modules.parallel.summed import SummedGradients
from lightning_modules.parallel.tensors import local

PRIVATE_NAMES = ("sharded_param", "_unsharded_param", "unsharded_accumulated_grad", "to_sharded_dtensor")
"""What is used of FSDP2's record of a parameter."""
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Its name from torch 2.14 on, and before."""


class ShardedGradients(SummedGradients):
    """Every rank gets its shards of the sum: by a reduce-scatter along the sharded dimension of the mesh, then an all-reduce
    of the shard along the replicated one, where there is one.

    Args:
        parameters: the trainable ones (DTensors), in the same order on every rank.
        module: what ``fully_shard`` was applied to, or a module around it; its own synchronisation is switched off.
        ranks, reduce_dtype: as for :class:`SummedGradients`.

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
        records = _records(module)
        names = {id(p): name for name, p in module.named_parameters()}
        outside = [names.get(id(p), "?") for p in parameters if id(p) not in records]
        if outside:
            raise ValueError(
                f"trainable parameters outside the sharded modules: {', '.join(outside[:4])}; shard the module that holds "
                "them, freeze them, or use ddp"
            )
        self._records = [records[id(p)] for p in parameters]
        mesh = _sharded(parameters[0]).device_mesh
        self._replicas = mesh.get_group(0) if mesh.ndim > 1 else None
        self._sharers = mesh.get_group(mesh.ndim - 1)
        super().__init__(
            parameters, ranks, reduce_dtype=reduce_dtype, shards=mesh.size(mesh.ndim - 1), device=device_of(mesh)
        )
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.set_requires_gradient_sync(False, recurse=False)

    @contextmanager
    def into(self, buffer: Gradient) -> Iterator[None]:
        before = [_take(record) for record in self._records]
        for record, held in zip(self._records, buffer.tensors, strict=True):
            record.unsharded_accumulated_grad = held
        try:
            yield
        finally:
            for k, record in enumerate(self._records):
                buffer.tensors[k] = _take(record)
                record.unsharded_accumulated_grad = before[k]

    def _add_up(self, bucket: Tensor) -> Tensor:
        shard = torch.empty_like(bucket[0])
        _reduce_scatter(shard, bucket.view(-1), group=self._sharers)
        self.traffic.sent(bucket)
        if self._replicas is not None:
            dist.all_reduce(shard, group=self._replicas)
            self.traffic.sent(shard)
        return shard

    @torch.no_grad()
    def deliver(self, reduced: Gradient) -> None:
        for record, p, part in zip(self._records, self.parameters, reduced.tensors, strict=True):
            p.grad = None if part is None else record.to_sharded_dtensor(part.to(local(p).device, p.dtype))
        reduced.clear()


def _take(record: Any) -> Tensor | None:
    """The local gradient behind a parameter, which is then without one."""
    accumulated, record.unsharded_accumulated_grad = record.unsharded_accumulated_grad, None
    fresh = getattr(record, "_unsharded_param", None)  # absent until the parameter is first gathered
    if fresh is None or fresh.grad is None:
        return accumulated
    grad, fresh.grad = fresh.grad, None
    return grad if accumulated is None else accumulated.add_(grad)


def _records(module: nn.Module) -> dict[int, Any]:
    """id of a sharded parameter -> FSDP2's record of it."""
    records: dict[int, Any] = {}
    try:
        for part in module.modules():
            if isinstance(part, FSDPModule):
                state = part._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
                for record in (record for group in groups if group is not None for record in group.fsdp_params):
                    _check_names(type(record))
                    records[id(record.sharded_param)] = record
    except AttributeError as error:
        raise RuntimeError(
            f"torch {torch.__version__} keeps the local gradients of FSDP2 elsewhere ({error}): use a version from 2.11 to "
            "2.14, or ddp"
        ) from error
    return records


def _check_names(kind: type) -> None:
    """``AttributeError`` on a name that is gone. Some attributes are set late, so the class's declarations are read."""
    for name in PRIVATE_NAMES:
        if not hasattr(kind, name) and name not in kind.__annotations__:
            raise AttributeError(f"{kind.__name__} has no {name}")


def _sharded(parameter: Parameter) -> DTensor:
    assert isinstance(parameter, DTensor)
    return parameter

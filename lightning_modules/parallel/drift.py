"""What must be the same on every rank is compared now and then, so that a run whose ranks have drifted apart stops instead
of training several models and reporting one: replicated parameters, learning rates, counters, keys of the noise."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import Parameter

from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.tensors import local


def check_same_on_all(ranks: Ranks, facts: Mapping[str, Any], parameters: Sequence[Parameter]) -> None:
    """``ValueError`` on every rank, naming what differs and where, unless all ranks hold the same facts and the same
    parameters (of sharded ones, those ranks the same shards that should)."""
    if ranks.size == 1:
        return
    for name, value in facts.items():
        ranks.check_same(name, value)
    holders = defaultdict(dict)
    for rank, (shard, digest) in enumerate(ranks.gather((_shard(parameters), _digest(parameters)))):
        holders[shard].setdefault(digest, []).append(rank)
    for replicas in holders.values():
        if len(replicas) > 1:
            raise ValueError(
                f"the trained parameters are no longer the same on ranks {sorted(replicas.values())}: the ranks have drifted "
                "apart; resume from the last checkpoint, and look for what changes weights on one rank only"
            )


def _shard(parameters: Sequence[Parameter]) -> tuple[int, ...]:
    """This rank's place along the sharded dimensions of the mesh: ranks with the same place hold the same values."""
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            place = parameter.device_mesh.get_coordinate() or []
            return tuple(
                k for k, how in zip(place, parameter.placements, strict=True) if not isinstance(how, Replicate)
            )
    return ()


def _digest(parameters: Sequence[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for parameter in parameters:
        part = local(parameter.detach()).cpu().reshape(-1).contiguous()
        digest.update(part.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()

"""Gradients of several ranks, held apart, reduced and delivered, against plain autograd over everybody's rows in one
process. Functions for :mod:`tests.ranks`; each returns plain numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_modules.parallel.gradients import LocalGradients
from lightning_modules.parallel.norms import clip_grad_norm
from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.replicated import ReplicatedGradients
from lightning_modules.parallel.sharded import ShardedGradients
from lightning_modules.parallel.tensors import whole
from tests import tiny_models

FACTORS = (1.0, -0.5, 2.0)
"""By which a rank's rows count: what advantages do."""
ORDERS = ("one_buffer", "retain", "reweight")


class Tiny(nn.Module):
    """Nothing in it divides into 2 or 4 equal shards, and on 4 ranks some shards are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList([nn.Linear(7, 7), nn.Linear(7, 7)])
        self.last = nn.Linear(7, 3)
        self.gate = nn.Parameter(torch.ones(6))
        """Reached by the rows of rank 0 alone."""
        self.idle = nn.Parameter(torch.ones(3))
        """Reached by nobody."""

    def forward(self, x: Tensor, gated: bool) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.last(x).square().sum() + (self.gate.square().sum() if gated else 0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Which gradient, reduced how."""

    model: str = "tiny"
    """``tiny`` or a tiny SD3, ``full`` or ``lora``."""
    kind: str = "replicated"
    """``single``, ``replicated``, ``root`` (sharded as a whole), ``nested`` (its blocks, then the rest)."""
    order: str = "reweight"
    """``one_buffer``: backward calls one by one into one buffer; ``retain``: all forwards, then all backwards, each with
    one into a second buffer inside; ``reweight``: forward and backward by row into buffers of their own, scaled and added later."""
    dtype: torch.dtype = torch.float32
    checkpointing: bool = False
    replicate: int = 1
    empty: tuple[int, ...] = ()
    """Ranks that contribute nothing."""
    reduce_dtype: torch.dtype | None = None

    @property
    def sharded(self) -> bool:
        return self.kind in ("root", "nested")


def build(setting: Setting) -> tuple[nn.Module, Callable[[int], Tensor]]:
    """The model, the same on every rank, and row -> loss. Rows of rank r are ``len(FACTORS) r`` and the ones that follow."""
    if setting.model == "tiny":
        torch.manual_seed(3)
        tiny = Tiny().to(setting.dtype)
        return tiny, lambda row: tiny(_noise(row, 2, 5).to(setting.dtype), gated=row < len(FACTORS))
    policy = tiny_models.policy("sd3", trainable=setting.model, activation_checkpointing=setting.checkpointing)
    tiny_models.move(policy)  # adapters no longer add zero
    conditioning = policy.encode(tiny_models.PROMPTS[:1])
    latent = policy.latent_shape
    return policy, lambda row: policy(_noise(row, 1, *latent), torch.tensor([0.7]), conditioning).square().sum()


def _noise(row: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(row))


def trainable(module: nn.Module) -> list[nn.Parameter]:
    return [p for p in module.parameters() if p.requires_grad]


def reference(setting: Setting, ranks: int) -> list[Tensor | None]:
    """The sum over all ranks' rows by autograd."""
    module, loss = build(setting)
    for rank in set(range(ranks)) - set(setting.empty):
        for k, factor in enumerate(FACTORS):
            (factor * loss(len(FACTORS) * rank + k)).backward()
    return [p.grad for p in trainable(module)]


def mesh_of(setting: Setting) -> DeviceMesh:
    size = dist.get_world_size()
    if setting.replicate == 1:
        return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    shape = (setting.replicate, size // setting.replicate)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def split(module: nn.Module, setting: Setting) -> None:
    """Shard as the setting says."""
    root, mesh = getattr(module, "transformer", module), mesh_of(setting)
    if setting.kind == "nested":
        for block in root.blocks if setting.model == "tiny" else root.transformer_blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(root, mesh=mesh)


def gradients_of(module: nn.Module, setting: Setting, ranks: Ranks) -> LocalGradients:
    if setting.kind == "single":
        return LocalGradients(trainable(module))
    if setting.kind == "replicated":
        return ReplicatedGradients(trainable(module), ranks, setting.reduce_dtype)
    split(module, setting)
    return ShardedGradients(trainable(module), module, ranks, setting.reduce_dtype)


def collect(gradients: LocalGradients, loss: Callable[[int], Tensor], rank: int, order: str) -> Any:
    """This rank's local gradient."""
    rows, total = [len(FACTORS) * rank + k for k in range(len(FACTORS))], gradients.buffer()
    if order == "one_buffer":
        with gradients.into(total):
            for row, factor in zip(rows, FACTORS, strict=True):
                (factor * loss(row)).backward()
    elif order == "retain":
        losses, other = [loss(row) for row in rows], gradients.buffer()
        for part, factor in zip(losses, FACTORS, strict=True):
            with gradients.into(total):
                (factor * part).backward(retain_graph=True)
                with gradients.into(other):
                    part.backward()
        assert not other.empty
    else:
        units = [gradients.buffer() for _ in rows]
        for unit, row in zip(units, rows, strict=True):
            with gradients.into(unit):
                loss(row).backward()
        for unit, factor in zip(units, FACTORS, strict=True):
            total.add_(unit, factor)
    return total


def compare(setting: Setting) -> dict[str, Any]:
    """``error``: relative L2 of the delivered gradient; ``gaps``: names of the parameters without one; ``traffic``;
    ``norm``: relative error of the global norm; ``clipped``: of the gradient that is clipped to half of it; ``stray``:
    whether gradients were left where autograd puts them, or a parameter had one before it was delivered."""
    ranks = Ranks.alone() if setting.kind == "single" else Ranks.connected(20)
    wanted = reference(setting, ranks.size)
    module, loss = build(setting)
    gradients = gradients_of(module, setting, ranks)
    parameters = gradients.parameters
    total = collect(gradients, loss, ranks.rank, setting.order)
    if ranks.rank in setting.empty:
        total.clear()
    undelivered = any(p.grad is not None for p in parameters)
    reduced = gradients.reduce(total)
    emptied = total.empty
    gradients.deliver(reduced)
    leftover = gradients.buffer()
    with gradients.into(leftover):
        pass
    ours, names = [p.grad for p in parameters], [name for name, p in module.named_parameters() if p.requires_grad]
    gaps = [name for name, part in zip(names, ours, strict=True) if part is None]
    assert gaps == [name for name, part in zip(names, wanted, strict=True) if part is None]
    result = {
        "error": _error(ours, wanted),
        "gaps": gaps,
        "traffic": (gradients.traffic.reductions, gradients.traffic.collectives, gradients.traffic.bytes),
        "stray": undelivered or not emptied or not leftover.empty or not reduced.empty,
        "alike": all(
            g is None or (type(g) is type(p.data) and g.dtype == p.dtype) for g, p in zip(ours, parameters, strict=True)
        ),
    }
    if wanted_parts := [part for part in wanted if part is not None]:
        exact = torch.cat([part.flatten() for part in wanted_parts]).double().norm().item()
        norm = clip_grad_norm(parameters, exact / 2)
        result["norm"] = abs(norm / exact - 1)
        result["clipped"] = _error([p.grad for p in parameters], [None if w is None else w / 2 for w in wanted])
    ranks.close()
    return result


def _error(ours: list[Any], wanted: list[Tensor | None]) -> float:
    pairs = [(whole(part), exact) for part, exact in zip(ours, wanted, strict=True) if exact is not None]
    if not pairs:
        return 0.0
    distance = sum((part.double() - exact.double()).square().sum() for part, exact in pairs)
    return (distance / sum(exact.double().square().sum() for _, exact in pairs)).sqrt().item()

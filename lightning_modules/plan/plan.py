"""The plan of a run, known before its first iteration: sizes, memory and policy forwards of the chosen schedule.

Memory is that of the busiest rank, from live tensors: allocator blocks, kernels' workspaces, images and
whatever a reward model takes come on top. Bytes are counted, not measured; nothing large is allocated to find them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.denoise import ReverseProcess
from lightning_modules.flow.windows import Window
from lightning_modules.parallel.layout import Kind
from lightning_modules.parallel.sharding import blocks, roots
from lightning_modules.plan.activations import innermost, measure
from lightning_modules.plan.held import Work, held
from lightning_modules.policies.base import Policy
from lightning_modules.policies.lora import adapter_layers
from lightning_modules.schedules.base import Schedule
from lightning_modules.types import Conditioning, Rows

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a run will do and hold. Bytes are at the worst moment of an iteration."""

    policy: str
    schedule: str
    parameters: int
    """elements of the backbone, adapters included."""
    trainable: int
    """elements that are trained."""
    trainable_tensors: int
    samples: int
    """generations of an iteration, all ranks together."""
    samples_per_rank: int
    """at most."""
    ranks: int
    layout: str
    """which rank makes which generation."""
    idle_slots: int
    """generations that ranks could have made beside these."""
    shards: int
    """ranks over which weights, optimizer and the reduced gradient are sharded; 1 = whole on every rank."""
    trained_steps: int
    sigmas: list[float]
    """the noise grid, T + 1 levels."""
    forward_rows: int
    """rows through the policy in an iteration, all ranks together."""
    reference_rows: int
    """rows through the KL reference."""
    backbone_rows: int
    """rows through the backbone for each of these: 2 under classifier-free guidance."""
    graph_rows: int
    """rows of a forward with gradients."""
    retained_row_steps: int
    """(row, step) pairs whose activations are held at once."""
    activation_bytes_per_step: int
    """of one row at one trained step."""
    weight_bytes: int
    """frozen weights and buffers, or all of them in full fine-tuning."""
    adapter_bytes: int
    reference_bytes: int
    """a frozen copy for the KL term of full fine-tuning."""
    optimizer_bytes: int | None
    """``None`` if the optimizer cannot be tried without data."""
    gathered_bytes: int
    """weights that are whole for a moment, where they are sharded: what lies outside the blocks, and two blocks."""
    gradient_bytes: int
    """local gradients are whole, also where weights are sharded."""
    latent_bytes: int
    conditioning_bytes: int
    activation_bytes: int
    encoder_bytes: int
    """frozen text encoders, wherever they are; not part of the total."""
    vae_bytes: int
    """frozen VAE, wherever it is; not part of the total."""

    @property
    def total_bytes(self) -> int:
        """Of the tensors that live where the policy does."""
        return sum(size or 0 for _, size, _ in self.memory())

    @property
    def frozen_bytes(self) -> int:
        """Of whatever is frozen, beside the total."""
        return self.encoder_bytes + self.vae_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"total_bytes": self.total_bytes, "frozen_bytes": self.frozen_bytes}

    def memory(self) -> list[tuple[str, int | None, str]]:
        """(name, bytes, remark) of every part of the total."""
        held = f"{self.retained_row_steps} x {readable(self.activation_bytes_per_step)} per row and step"
        return [
            ("weights", self.weight_bytes, ""),
            ("adapters", self.adapter_bytes, ""),
            ("KL reference", self.reference_bytes, ""),
            ("optimizer", self.optimizer_bytes, ""),
            ("gathered", self.gathered_bytes, "of sharded weights at a time"),
            ("gradients", self.gradient_bytes, ""),
            ("latents", self.latent_bytes, ""),
            ("conditioning", self.conditioning_bytes, ""),
            ("activations", self.activation_bytes, held),
        ]

    def __str__(self) -> str:
        share = self.trainable / self.parameters
        reference = f" + {self.reference_rows:,} of the reference" if self.reference_rows else ""
        branches = f", {self.backbone_rows} backbone rows each" if self.backbone_rows > 1 else ""
        rank = "" if self.samples_per_rank == self.samples else f", at most {self.samples_per_rank} per rank"
        lines = [
            f"plan             {self.policy} under {self.schedule}",
            f"parameters       {self.parameters:,}",
            f"trainable        {self.trainable:,} in {self.trainable_tensors:,} tensors ({share:.3%})",
            f"samples          {self.samples:,} per iteration{rank}",
            f"steps            {len(self.sigmas) - 1}, trained {self.trained_steps}",
            f"sigmas           {' '.join(f'{sigma:.4f}' for sigma in self.sigmas)}",
            f"policy forwards  {self.forward_rows:,} rows per iteration{reference}{branches}",
        ]
        if self.ranks > 1:
            idle = (
                f"{self.idle_slots} of {self.samples_per_rank * self.ranks} slots idle"
                if self.idle_slots
                else "no slot idle"
            )
            sharded = f"; weights sharded over {self.shards}" if self.shards > 1 else "; weights whole on each"
            lines.insert(
                4, f"ranks            {self.ranks}, layout {self.layout}, {idle}{sharded}; memory is that of one rank"
            )
        for name, size, note in self.memory():
            if size != 0:
                lines.append(f"{name:<16} {readable(size):>10}  {note}".rstrip())
        lines.append(f"{'total':<16} {readable(self.total_bytes):>10}  without images, workspaces and reward models")
        for name, size in (("text encoders", self.encoder_bytes), ("VAE", self.vae_bytes)):
            if size:
                lines.append(f"{name:<16} {readable(size):>10}  beside it, on its own device")
        return "\n".join(lines)


def readable(size: int | None) -> str:
    """Bytes with a binary unit and three figures; ``unknown`` for ``None``."""
    if size is None:
        return "unknown"
    value, units = float(size), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1000 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "B" else f"{value:.3g} {units[0]}"


def plan(
    *,
    policy: Policy,
    schedule: Schedule,
    process: ReverseProcess,
    window: Window,
    advantage: GroupAdvantage,
    optimizer: Callable[[Iterable[Parameter]], Optimizer],
    conditioning: Conditioning,
    prompts: int,
    generations: int,
    groups_in_flight: int = 1,
    micro_batch: int | None = None,
    beta: float = 0.0,
    seed: int = 0,
    ranks: int = 1,
    layout: Kind = "shared",
    shards: int = 1,
    reward_weights: tuple[float, ...] | None = None,
    device: torch.device | str | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Plan:
    """Plan a run.

    Args:
        conditioning: of any prompt; at least one row, of which only shape and dtype matter.
        prompts: B, prompts of an iteration.
        ranks: processes that share an iteration's samples, by ``layout``.
        shards: of these, processes that share the weights (FSDP2).
        reward_weights: of the weighted rewards; ``None``: unknown.
        device: whose kernels are assumed; ``None``: the policy's, or the CPU for a policy on ``meta``.
        autocast: makes the context that training runs in.
        others: as in ``LeanGRPO``.

    Errors: ``ValueError`` for a schedule of an unknown kind.
    """
    trained = [p for p in policy.parameters() if p.requires_grad]
    size = window.size(process.num_steps)
    work = Work(
        prompts=prompts,
        generations=generations,
        groups_in_flight=groups_in_flight,
        micro_batch=micro_batch,
        ranks=ranks,
        kind=layout,
        num_steps=process.num_steps,
        trained_steps=size,
        advantage=advantage,
        reward_weights=reward_weights,
        beta=beta,
        narrow=_nbytes(trained),
        wide=sum(p.numel() * max(p.element_size(), 4) for p in trained),
        shards=shards,
    )
    holds, whole = held(schedule, work), held(schedule, replace(work, ranks=1))
    step = int(window.candidates(process.num_steps).nonzero()[0])
    activations = measure(policy, process, conditioning, holds.graph_rows, step=step, device=device, autocast=autocast)
    adapted = bool(adapter_layers(policy))
    adapters = _nbytes(trained) if adapted else 0
    weights = _nbytes([*policy.parameters(), *policy.buffers()]) - adapters
    of_optimizer = optimizer_bytes(optimizer, trained)
    rows = Rows(prompt=torch.zeros(work.call, dtype=torch.int64), generation=torch.arange(work.call))
    latent = 4 * torch.Size(policy.latent_shape).numel()
    frozen, vae = _frozen_bytes(policy)
    return Plan(
        policy=type(innermost(policy)).__name__,
        schedule=type(schedule).__name__,
        parameters=sum(p.numel() for p in policy.parameters()),
        trainable=sum(p.numel() for p in trained),
        trainable_tensors=len(trained),
        samples=prompts * generations,
        samples_per_rank=work.samples,
        ranks=ranks,
        layout=layout,
        idle_slots=work.layout.idle_slots,
        shards=shards,
        trained_steps=size,
        sigmas=process.sigmas.tolist(),
        forward_rows=whole.forward_rows,
        reference_rows=whole.scored_rows if beta > 0 else 0,
        backbone_rows=activations.backbone_rows // holds.graph_rows,
        graph_rows=holds.graph_rows,
        retained_row_steps=holds.row_steps,
        activation_bytes_per_step=activations.per_step // holds.graph_rows,
        weight_bytes=ceil(weights / shards),
        adapter_bytes=ceil(adapters / shards),
        reference_bytes=ceil(weights / shards) if beta > 0 and not adapted else 0,
        optimizer_bytes=None if of_optimizer is None else ceil(of_optimizer / shards),
        gathered_bytes=gathered_bytes(policy) if shards > 1 else 0,
        gradient_bytes=holds.gradient_bytes + (ceil(work.narrow / shards) if shards > 1 else 0),
        latent_bytes=work.samples
        * latent
        * levels_held(window.trained(process.num_steps, seed=seed, iteration=0, rows=rows)),
        conditioning_bytes=work.samples * sum(_nbytes([t]) // len(t) for t in conditioning.tensors.values()),
        activation_bytes=activations.once + activations.per_step * holds.row_steps // holds.graph_rows,
        encoder_bytes=frozen - vae,
        vae_bytes=vae,
    )


def gathered_bytes(policy: Policy) -> int:
    """Weights that a forward of a sharded policy has whole at a time: those outside its blocks, the block that computes and
    the next one, which is already under way."""
    units = [[_nbytes(block.parameters()) for block in blocks(root)] for root in roots(policy)]
    return max(
        _nbytes(root.parameters()) - sum(sizes) + sum(sorted(sizes)[-2:])
        for root, sizes in zip(roots(policy), units, strict=True)
    )


def levels_held(trained: Tensor) -> int:
    """Latents kept of each row until the iteration ends, from the trained steps ``[N, T]`` of a micro-batch: its first and
    last, and both ends of every trained step. Steps that all rows train share their ends; otherwise rows are copied."""
    first = trained[0]
    if bool((trained != first).any()):
        return 2 + 2 * int(first.sum())
    steps = first.nonzero().flatten().tolist()
    return len({0, len(first), *steps, *(step + 1 for step in steps)})


def optimizer_bytes(
    optimizer: Callable[[Iterable[Parameter]], Optimizer], parameters: Iterable[Parameter]
) -> int | None:
    """Bytes of the optimizer's state after a step, found on the ``meta`` device; ``None`` where it refuses to step there."""
    stand_ins = [Parameter(torch.empty_like(p, device="meta")) for p in parameters]
    for parameter in stand_ins:
        parameter.grad = torch.empty_like(parameter)
    try:
        tried = optimizer(stand_ins)
        tried.step()
    except (RuntimeError, TypeError, ValueError):  # whatever a foreign optimizer says of meta tensors
        return None
    return _nbytes(t for state in tried.state.values() for t in state.values() if isinstance(t, Tensor))


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def _frozen_bytes(policy: Policy) -> tuple[int, int]:
    """Of all frozen parts, and of the VAE among them."""
    frozen = getattr(innermost(policy), "frozen", None)
    if frozen is None:
        return 0, 0
    vae = getattr(frozen, "vae", None)
    return frozen.nbytes, 0 if vae is None else _nbytes([*vae.parameters(), *vae.buffers()])

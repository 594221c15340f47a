"""What each schedule runs and holds, as counts: rows through the policy, graphs and gradients alive at its worst moment.

Notation: B prompts, M generations, R ranks, a chunk of ``groups_in_flight`` groups rolled out in micro-batches, T steps, |S|
of them trained. What is counted is the busiest rank's. A gradient in the parameters' dtype takes ``narrow`` bytes, one
accumulated in at least fp32 takes ``wide`` bytes.

A schedule of another kind joins by registering what it holds: ``@held.register``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property, singledispatch
from math import ceil

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.parallel.layout import Kind, Layout
from lightning_modules.schedules.base import Schedule
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.schedules.reweight_sharded import ReweightSharded


@dataclass(frozen=True, kw_only=True)
class Work:
    """One iteration's work, of which each rank does its share."""

    prompts: int
    """B."""
    generations: int
    """M."""
    groups_in_flight: int
    micro_batch: int | None
    """rows per policy call; ``None``: the whole chunk."""
    ranks: int = 1
    """R."""
    kind: Kind = "shared"
    """of the layout."""
    num_steps: int
    """T."""
    trained_steps: int
    """|S|."""
    advantage: GroupAdvantage
    reward_weights: tuple[float, ...] | None = None
    """of the weighted rewards; ``None``: unknown."""
    beta: float
    narrow: int
    """bytes of one gradient in the parameters' dtype."""
    wide: int
    """bytes of one gradient in at least fp32."""
    shards: int = 1
    """S, processes that share the weights and what is added up of their gradients (FSDP2)."""

    @cached_property
    def layout(self) -> Layout:
        return Layout(prompts=self.prompts, generations=self.generations, ranks=self.ranks, kind=self.kind)

    @property
    def samples(self) -> int:
        """Rows that a rank makes."""
        return self.layout.waves

    @property
    def group(self) -> int:
        """Members of a group that a rank makes."""
        return self.generations if self.kind == "per_rank" else -(-self.generations // self.ranks)

    @cached_property
    def chunk(self) -> int:
        """Rows whose backward comes together: a rank may have begun with the next group."""
        chunks = self.layout.chunks(self.groups_in_flight, self.micro_batch)
        largest = done = 0
        for k, chunk in enumerate(chunks):
            rounds = [part for earlier in chunks[: k + 1] for part in earlier.rounds if part.closes > done]
            largest, done = max(largest, sum(part.stop - part.start for part in rounds)), chunk.stop
        return largest

    @cached_property
    def call(self) -> int:
        """Rows of a rollout's policy call."""
        chunks = self.layout.chunks(self.groups_in_flight, self.micro_batch)
        return max(part.stop - part.start for chunk in chunks for part in chunk.rounds)


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a schedule runs in an iteration, and holds at its worst moment."""

    forward_rows: int
    """rows through a rank's policy in an iteration, without the reference's."""
    scored_rows: int
    """of these, rows with gradients; under a KL term the reference sees them too."""
    graph_rows: int
    """rows of one forward with gradients."""
    row_steps: int
    """(row, trained step) pairs whose graphs are alive at once."""
    gradient_bytes: int
    """gradients alive at once, ``.grad`` included."""


@singledispatch
def held(schedule: Schedule, work: Work) -> Held:
    """Errors: ``ValueError`` for a schedule that nobody has registered."""
    raise ValueError(f"nothing is known of what {type(schedule).__name__} holds: register it with plan.held.held")


@held.register
def _native(schedule: Native, work: Work) -> Held:
    updates = schedule.updates_per_rollout if schedule.samples_per_update == "all" else 1
    rows = min(schedule.micro_batch or work.call, work.call)
    return Held(
        forward_rows=work.samples * (work.num_steps + updates * work.trained_steps),
        scored_rows=work.samples * updates * work.trained_steps,
        graph_rows=rows,
        row_steps=rows,
        gradient_bytes=_in_place(work),
    )


@held.register
def _retain(schedule: Retain, work: Work) -> Held:
    rows = work.samples if work.advantage.needs_iteration else work.chunk
    return Held(
        forward_rows=work.samples * work.num_steps,
        scored_rows=work.samples * work.trained_steps,
        graph_rows=work.call,
        row_steps=rows * work.trained_steps,
        gradient_bytes=_in_place(work),
    )


@held.register
def _reweight(schedule: Reweight, work: Work) -> Held:
    streaming = schedule.storage != "per_sample" and work.advantage.is_affine(work.generations, work.reward_weights)
    return Held(
        forward_rows=work.samples * work.num_steps,
        scored_rows=work.samples * work.trained_steps,
        graph_rows=1,
        row_steps=1,
        gradient_bytes=max(
            _streaming(work) if streaming else _per_sample(work),
            work.wide + (work.narrow if work.narrow < work.wide else 0),  # the total and its cast into .grad
        ),
    )


@held.register
def _reweight_sharded(schedule: ReweightSharded, work: Work) -> Held:
    """One gradient per row of a round, and the one they are scaled into; as shards, the total and the sums of the groups
    that stay open after a round."""
    open_groups = 1 if work.kind == "shared" else min(work.ranks, work.prompts)
    if work.advantage.needs_iteration:
        open_groups = work.prompts
    elif work.call >= work.group:
        open_groups = 0
    sums = open_groups * (1 + work.advantage.terms(work.reward_weights))
    return replace(
        _reweight(schedule, work),
        gradient_bytes=work.call * work.narrow + work.wide + _kl(work) + ceil((sums + 1) * work.wide / work.shards),
    )


def _in_place(work: Work) -> int:
    """Backward calls accumulate into one gradient; a second one where the KL term is not divided by the global std."""
    return work.narrow * (2 if work.beta > 0 and work.advantage.deferred else 1)


def _kl(work: Work) -> int:
    return work.narrow if work.beta > 0 else 0


def _per_sample(work: Work) -> int:
    """One gradient per row until its advantage is known, and the total they are scaled into."""
    rows = work.samples if work.advantage.needs_iteration else work.chunk
    return rows * work.narrow + work.wide + _kl(work)


def _streaming(work: Work) -> int:
    """Row by row, chunk by chunk: a micro-batch's unit gradients are folded one by one into the sums of their group, whose
    closing makes the total if no earlier chunk has. Groups stay open to the end where no advantage is known before."""
    opens = {0: 1, 1: work.advantage.terms(work.reward_weights)}  # a group's first row opens S0, its second every S1
    sums = peak = total = 0
    for chunk in _parts(0, work.samples, work.chunk):
        for call in _parts(chunk.start, chunk.stop, work.call):
            for row in call:
                peak = max(peak, (call.stop - row) * work.narrow + (sums + total) * work.wide)
                sums += opens.get(row % work.group, 0)
                peak = max(peak, (call.stop - row) * work.narrow + (sums + total) * work.wide)
        if chunk.stop == work.samples or not work.advantage.needs_iteration:
            total = 1
            peak, sums = max(peak, (sums + total) * work.wide), 0
    return peak + _kl(work)


def _parts(start: int, stop: int, size: int) -> list[range]:
    return [range(first, min(first + size, stop)) for first in range(start, stop, size)]

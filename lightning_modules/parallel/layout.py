"""Who makes which generation: a re-indexing of the same (prompt, generation) pairs, so that no layout changes the
gradient. Pure functions of the numbers of ranks, prompts and generations; every rank knows everybody's share.

Time is counted in *waves*: in one wave every rank makes one generation. Consecutive waves that run as one micro-batch
are a *round*; the rounds after which some groups are complete, hence scored and backpropagated, are a *chunk*.

``shared`` (LeanGRPO, arXiv 2609.03528, section 3): all ranks work on the same prompt, each on other members of its
group, so that nobody holds the differentiable state of a whole group. With ``slot = prompt * M + generation``,

    rank = slot mod R,   wave = slot div R

which is the paper's layout where R divides M (``Q = M / R`` rounds per prompt) or M divides R (``R / M`` prompts at
once), and idles at most ``R - 1`` slots per iteration everywhere else; a rank may then hold one sample of the next group.

``per_rank``, the conventional baseline: prompt ``b`` belongs to rank ``b mod R``, which makes its whole group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from lightning_modules.types import Rows

Kind = Literal["shared", "per_rank"]


@dataclass(frozen=True, kw_only=True)
class Round:
    """Waves that run as one micro-batch."""

    start: int
    """First wave."""
    stop: int
    """One past the last."""
    closes: int
    """Number of waves after which every group with a member in this round is complete."""


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """What is rolled out before the next scoring."""

    rounds: tuple[Round, ...]
    stop: int
    """Waves done at its end."""
    closed: tuple[int, ...]
    """Prompts whose groups are complete then, and were not before."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The shares of R ranks in an iteration of B prompts x M generations.

    Errors: ``ValueError`` on a number below 1 or an unknown kind.
    """

    prompts: int
    """B."""
    generations: int
    """M."""
    ranks: int = 1
    """R."""
    kind: Kind = "shared"

    def __post_init__(self) -> None:
        for name in ("prompts", "generations", "ranks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give an integer of at least 1")
        if self.kind not in get_args(Kind):
            raise ValueError(f"layout={self.kind!r}: choose one of {', '.join(get_args(Kind))}")

    @property
    def waves(self) -> int:
        """Generations that the busiest rank makes."""
        if self.kind == "shared":
            return -(-self.prompts * self.generations // self.ranks)
        return -(-self.prompts // self.ranks) * self.generations

    @property
    def idle_slots(self) -> int:
        """(rank, wave) pairs without work."""
        return self.waves * self.ranks - self.prompts * self.generations

    def slot(self, wave: int, rank: int) -> tuple[int, int] | None:
        """(prompt, generation) that ``rank`` makes in ``wave``; ``None`` where it idles."""
        if self.kind == "shared":
            prompt, generation = divmod(wave * self.ranks + rank, self.generations)
        else:
            turn, generation = divmod(wave, self.generations)
            prompt = turn * self.ranks + rank
        return (prompt, generation) if prompt < self.prompts else None

    def rows(self, start: int, stop: int, rank: int) -> Rows:
        """What ``rank`` makes in waves ``start`` to ``stop``, in order; maybe nothing."""
        slots = [slot for wave in range(start, stop) if (slot := self.slot(wave, rank)) is not None]
        ids = torch.tensor(slots, dtype=torch.int64).reshape(-1, 2)
        return Rows(prompt=ids[:, 0].contiguous(), generation=ids[:, 1].contiguous())

    def closing(self, prompt: int) -> int:
        """Number of waves after which the group of ``prompt`` is complete."""
        if self.kind == "shared":
            return -(-(prompt + 1) * self.generations // self.ranks)
        return (prompt // self.ranks + 1) * self.generations

    def chunks(
        self, groups_in_flight: int = 1, micro_batch: int | None = None, every_round: bool = False
    ) -> list[Chunk]:
        """The iteration's course.

        Args:
            groups_in_flight: how many times groups become complete before a chunk ends (where one wave completes
                several, they count once). On one rank: groups rolled out together before their backward.
            micro_batch: waves of a round, at most; ``None``: all that a chunk has.
            every_round: end a chunk after every round, whether it completes a group or not.
        """
        closings: dict[int, list[int]] = {}
        for prompt in range(self.prompts):
            closings.setdefault(self.closing(prompt), []).append(prompt)
        stops = sorted(closings)
        chunks, start = [], 0
        for k in range(0, len(stops), groups_in_flight):
            part = stops[k : k + groups_in_flight]
            closed = tuple(prompt for stop in part for prompt in closings[stop])
            chunks.append(Chunk(rounds=tuple(self._rounds(start, part[-1], micro_batch)), stop=part[-1], closed=closed))
            start = part[-1]
        return [one for chunk in chunks for one in self._apart(chunk)] if every_round else chunks

    def _apart(self, chunk: Chunk) -> Iterator[Chunk]:
        """A chunk for each of its rounds."""
        for part in chunk.rounds:
            closed = tuple(prompt for prompt in chunk.closed if part.start < self.closing(prompt) <= part.stop)
            yield Chunk(rounds=(part,), stop=part.stop, closed=closed)

    def _rounds(self, start: int, stop: int, micro_batch: int | None) -> list[Round]:
        """Rounds of the waves of one chunk. A last wave that begins the next group is a round of its own: the others
        need not wait for that group."""
        last = self._closes(stop - 1, stop)
        cut = stop if last <= stop else stop - 1
        size = micro_batch or max(1, cut - start)
        rounds = [
            Round(start=wave, stop=min(wave + size, cut), closes=self._closes(wave, min(wave + size, cut)))
            for wave in range(start, cut, size)
        ]
        return rounds if cut == stop else [*rounds, Round(start=cut, stop=stop, closes=last)]

    def prompts_of(self, part: Round) -> set[int]:
        """Prompts with a member in a round, on any rank."""
        return self._prompts(part.start, part.stop)

    def _closes(self, start: int, stop: int) -> int:
        return self.closing(max(self._prompts(start, stop)))

    def _prompts(self, start: int, stop: int) -> set[int]:
        slots = (self.slot(wave, rank) for wave in range(start, stop) for rank in range(self.ranks))
        return {slot[0] for slot in slots if slot is not None}

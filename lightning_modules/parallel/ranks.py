"""The processes of a run, and the small things they tell each other: rewards with their ids, counters, failures.

These go over a gloo group of their own, also where gradients go over NCCL. Every wait is bounded, and a rank that does
not arrive is named: ``torch.distributed.monitored_barrier`` runs before each exchange.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import torch.distributed as dist

T = TypeVar("T")
GRACE = 60.0
"""Seconds that a rank which has failed waits for the others to hear of it, at most."""


class Ranks:
    """All processes of a run, seen from one of them. Make it with :meth:`alone` or :meth:`connected`."""

    def __init__(self, rank: int, size: int, group: Any = None, timeout: float = 0.0) -> None:
        self.rank, self.size = rank, size
        self._group, self._timeout = group, timeout

    @classmethod
    def alone(cls) -> Ranks:
        """A single process; nothing is communicated."""
        return cls(0, 1)

    @classmethod
    def connected(cls, timeout: float) -> Ranks:
        """The processes of the default process group. ``timeout``: seconds to wait for a rank, above 0."""
        if not dist.is_initialized():
            raise RuntimeError("no process group: start the processes by the trainer, torchrun or SLURM")
        limit = timedelta(seconds=timeout)
        return cls(dist.get_rank(), dist.get_world_size(), dist.new_group(backend="gloo", timeout=limit), timeout)

    def close(self) -> None:
        """Leave the group; the object is then of no use."""
        if self._group is not None:
            dist.destroy_process_group(self._group)
            self._group = None

    def gather(self, value: T, what: str = "an exchange") -> list[T]:
        """Every rank's ``value`` (picklable and small), in the order of the ranks. Errors: ``RuntimeError`` naming the
        ranks that do not arrive in time, or that have arrived at something else."""
        return [value] if self.size == 1 else self._wait_and_gather(value, what)

    def share(self, work: Callable[[], T], what: str) -> list[T]:
        """Do ``work`` on every rank and exchange the results. Where it fails on some rank no rank goes on: that rank
        raises its own exception, the others a ``RuntimeError`` that says which rank failed and how."""
        if self.size == 1:
            return [work()]
        try:
            result = work()
        except Exception as error:
            self._tell((None, f"{type(error).__name__}: {error}"), what)
            raise
        outcomes: list[tuple[T, str | None]] = self.gather((result, None), what)
        failed = {rank: message for rank, (_, message) in enumerate(outcomes) if message is not None}
        if failed:
            rank, message = next(iter(failed.items()))
            raise RuntimeError(f"rank {rank} failed in {what}: {message}")
        return [result for result, _ in outcomes]

    def check_same(self, what: str, value: Any) -> None:
        """``ValueError`` on every rank, naming ``what`` and the ranks that differ from the first, unless the values are
        equal in their ``repr``."""
        values = self.gather(repr(value), what)
        differing = [rank for rank, other in enumerate(values) if other != values[0]]
        if differing:
            first, other = _around_first_difference(values[0], values[differing[0]])
            raise ValueError(
                f"{what} is not the same on all ranks: {first} on rank 0, {other} on rank(s) {differing}; start all "
                "processes with the same config and checkpoint"
            )

    def _tell(self, outcome: tuple[None, str], what: str) -> None:
        """Take part in an exchange for the others' sake. They may never come to it, where they wait for this rank's layers;
        so it goes on in the background, and is left there."""

        def tell() -> None:
            with suppress(RuntimeError):
                self.gather(outcome, what)

        thread = Thread(target=tell, daemon=True)
        thread.start()
        thread.join(GRACE)

    def _wait_and_gather(self, value: T, what: str) -> list[T]:
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=self._timeout), wait_all_ranks=True)
            arrived: list[Any] = [None] * self.size
            dist.all_gather_object(arrived, (what, value), group=self._group)
        except RuntimeError as error:
            raise RuntimeError(
                f"rank {self.rank}: not every rank arrived at {what} within {self._timeout:g} s ({error}); look at the log of "
                "the rank that is missing"
            ) from error
        elsewhere = {rank: place for rank, (place, _) in enumerate(arrived) if place != what}
        if elsewhere:
            raise RuntimeError(
                f"rank {self.rank} is at {what}, but rank {', '.join(f'{r} at {p}' for r, p in elsewhere.items())}: the "
                "ranks have taken different ways; start all processes with the same config and checkpoint"
            )
        return [value for _, value in arrived]


def _around_first_difference(one: str, other: str, width: int = 200) -> tuple[str, str]:
    """Both texts where they part, at most ``width`` characters of each."""
    if max(len(one), len(other)) <= width:
        return one, other
    parting = next((k for k, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(0, parting - width // 2)
    before = "..." if start else ""
    return before + one[start : start + width], before + other[start : start + width]

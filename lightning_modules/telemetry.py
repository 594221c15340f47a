"""What an iteration cost and showed: sums, means and extremes that add up over updates and over ranks."""

from __future__ import annotations

import resource
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Numbers of one update or one rank; ``+`` puts two together."""

    totals: dict[str, float] = field(default_factory=dict)
    """name -> what adds up."""
    means: dict[str, tuple[float, float]] = field(default_factory=dict)
    """name -> (sum, count)."""
    largest: dict[str, float] = field(default_factory=dict)
    """name -> what the largest counts of."""

    def __add__(self, other: Tally) -> Tally:
        totals, means, largest = dict(self.totals), dict(self.means), dict(self.largest)
        for name, value in other.totals.items():
            totals[name] = totals.get(name, 0.0) + value
        for name, (total, count) in other.means.items():
            before = means.get(name, (0.0, 0.0))
            means[name] = (before[0] + total, before[1] + count)
        for name, value in other.largest.items():
            largest[name] = max(largest.get(name, value), value)
        return Tally(totals=totals, means=means, largest=largest)

    def metrics(self) -> dict[str, float]:
        """name -> scalar; a mean of nothing is left out."""
        totals = {name: float(value) for name, value in self.totals.items()}
        return totals | {n: total / count for n, (total, count) in self.means.items() if count} | self.largest


class Stopwatch:
    """Adds up wall-clock seconds by phase. On an accelerator each phase ends with a synchronisation, since the work a
    phase queued belongs to it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            self.seconds[phase] += time.perf_counter() - start


def peak_memory_mib(device: torch.device) -> float:
    """MiB: on CUDA the peak the allocator has reached since the last call, elsewhere the process's peak resident set
    since it started (which never falls)."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device) / 2**20
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)

"""Seconds by phase, their spread, and the bound on what leaving out the recomputation can gain.

**Bound.** Native differs from a lean schedule by one more policy forward per trained step. With ``t`` its time for one
iteration, ``|S|`` trained steps and ``F`` the time of one forward WITHOUT gradients of all the iteration's rows, in the
same micro-batches, no schedule that only leaves these forwards out is faster than Native by more than

    bound = t / (t - |S| F).

Counting instead of measuring misleads: the forward left out is the no-grad one of the rollout, which is cheaper than
the forward with gradients that moves into its place.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


class PhaseClock:
    """Wall-clock seconds by phase. Phases nest, and each moment counts for the innermost one alone, so that the phases
    add up to the whole. On an accelerator a phase's border waits for the work queued before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._open: list[str] = []
        self.seconds: dict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self._charge()
        self._open.append(phase)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        """Book the time since the last border on the phase that has been running."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and quartiles of repeated measurements."""

    median: float
    q1: float
    q3: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        q1, median, q3 = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        return Spread(median=median, q1=q1, q3=q3)


def bound(native_seconds: float, trained_steps: int, forward_seconds: float) -> float:
    """``t / (t - |S| F)``, see above; seconds per iteration and per forward of all its rows. Errors: ``ValueError`` if
    the forwards alone took as long as the iteration, which no undisturbed measurement gives."""
    rest = native_seconds - trained_steps * forward_seconds
    if not rest > 0:
        raise ValueError(
            f"{trained_steps} forwards of {forward_seconds:.4g} s against {native_seconds:.4g} s for the whole iteration: "
            "the machine was disturbed; run again with more repetitions"
        )
    return native_seconds / rest

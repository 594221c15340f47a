"""Clock, quartiles and bound: no real timings."""

import time

import pytest
import torch

from benchmarks.timing import PhaseClock, Spread, bound


def test_bound_by_hand():
    assert bound(10.0, 4, 0.5) == 1.25
    assert bound(3.0, 0, 0.5) == 1.0


def test_the_papers_phase_times_give_its_bound():
    """LoRA at f = 1 (arXiv 2609.03528, Table 1 and Fig. 4): 1277.30 s per step, 411.46 s of it recomputation."""
    assert bound(1277.30, 5, 411.46 / 5) == pytest.approx(1.475, abs=5e-4)


def test_a_bound_from_disturbed_measurements_is_refused():
    with pytest.raises(ValueError, match="more repetitions"):
        bound(1.0, 4, 0.25)


def test_spread():
    assert Spread.of([4.0, 1.0, 2.0, 3.0, 5.0]) == Spread(median=3.0, q1=2.0, q3=4.0)


def test_each_moment_counts_for_the_innermost_phase(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    clock = PhaseClock(torch.device("cpu"))

    def wait(seconds):
        now[0] += seconds

    with clock("rollout"):
        wait(1)
        with clock("backward"):
            wait(2)
        wait(4)
    wait(8)
    with pytest.raises(RuntimeError, match="out of memory"), clock("update"):
        wait(16)
        raise RuntimeError("out of memory")
    wait(32)
    with clock("update"):
        wait(64)
    assert clock.seconds == {"rollout": 5.0, "backward": 2.0, "update": 80.0}

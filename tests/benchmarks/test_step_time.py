"""The step-time benchmark's own command line: what is counted and derived, never how long it took."""

import json
import statistics

import pytest

from benchmarks.step_time import PHASES, main
from benchmarks.timing import bound


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("step_time")
    with pytest.MonkeyPatch.context() as patch:  # a busy machine may time the forwards above the iteration
        patch.setattr("benchmarks.step_time.bound", lambda t, n, f: bound(max(t, 2 * n * f), n, f))
        comparison = main(["--quick", "--output", str(folder), "--repetitions=1"])
    return comparison, json.loads((folder / "step_time.json").read_text()), folder


@pytest.mark.parametrize("kind", ["same", "best"])
def test_rows_are_counted(written, kind):
    """6 samples, T = 5: T + |S| forward rows under Native, T under the lean schedules, |S| backward rows under each."""
    for r in getattr(written[0], kind):
        assert r.trained_steps == {0.5: 2, 1.0: 4}[r.fraction]
        assert r.forward_rows == 6 * (5 + r.trained_steps * (r.schedule == "Native"))
        assert r.backward_rows == 6 * r.trained_steps


def test_every_case_is_there_once(written):
    comparison, _, _ = written
    keys = [(fraction, schedule) for fraction in (0.5, 1.0) for schedule in ("Native", "Retain", "Reweight")]
    assert [(r.fraction, r.schedule) for r in comparison.same] == keys
    assert {r.micro_batch for r in comparison.same} == {3}
    for r in comparison.best:
        by_size = comparison.search[r.schedule]
        assert r.micro_batch == comparison.best_micro_batch[r.schedule] == min(by_size, key=by_size.get)


@pytest.mark.parametrize("kind", ["same", "best"])
def test_derived_numbers(written, kind):
    results = written[1]["results"][kind]
    for r in results:
        (native,) = [n for n in results if n["schedule"] == "Native" and n["fraction"] == r["fraction"]]
        seconds, native_seconds = statistics.median(r["rounds"]), statistics.median(native["rounds"])
        assert r["seconds"]["median"] == pytest.approx(seconds)
        assert r["speedup"]["median"] == pytest.approx(native_seconds / seconds)
        assert r["bound"] == native["bound"] > 1
        assert list(r["phases"]) == list(PHASES)
        assert (r["phases"]["backward"] > 0) and (r["phases"]["rollout"] > 0)


def test_files(written):
    _, record, folder = written
    assert record["command"].startswith("python -m benchmarks.step_time --quick")
    assert record["settings"]["repetitions"] == 1
    assert (folder / "step_time.png").read_bytes().startswith(b"\x89PNG")

"""What rank 0 sends, however late: who has ended well is no failure. Who fails is named."""

import multiprocessing
import time

import pytest

from benchmarks.processes import run_until_result

CONTEXT = multiprocessing.get_context("fork")


def send_late(pipe):
    time.sleep(0.3)
    pipe.send("a result")


def nothing(pipe):
    pass


def fail(pipe):
    raise SystemExit(3)


def hang(pipe):
    time.sleep(30)


def first_result(*functions, timeout=10.0):
    """Of processes that do these; the first has the pipe."""
    here, there = CONTEXT.Pipe(duplex=False)
    workers = [CONTEXT.Process(target=function, args=(there,), daemon=True) for function in functions]
    return run_until_result(workers, here, there, timeout)


def test_a_result_is_waited_for_after_another_process_has_ended():
    assert first_result(send_late, nothing) == "a result"


def test_a_process_that_fails_is_named():
    with pytest.raises(RuntimeError, match=r"^rank 1 \(exit code 3\) failed"):
        first_result(hang, fail)


def test_a_process_that_hangs_is_given_up():
    with pytest.raises(RuntimeError, match="no result within 0.2 s"):
        first_result(hang, nothing, timeout=0.2)

"""The processes that distributed tests run on: as torchrun sets them up, bounded in time, failures by rank, none left."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import Pool, RankError, pool

NAMES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")


def surroundings(factor):
    return [os.environ[name] for name in NAMES], dist.get_rank(), dist.get_world_size(), factor * dist.get_rank()


@pytest.mark.parametrize("size", [2, 4])
def test_processes_are_set_up_as_torchrun_does(size):
    assert pool(size).run(surroundings, 10) == [
        ([str(rank), str(rank), str(size), str(size), "0", "1", "1"], rank, size, 10 * rank) for rank in range(size)
    ]


def identity():
    return os.getpid()


def test_processes_are_reused():
    assert pool(2).run(identity) == pool(2).run(identity)


def leave():
    with pytest.raises(RuntimeError, match="loopback only"):
        socket.create_connection(("192.0.2.1", 80))  # reserved for documentation: RFC 5737
    with pytest.raises(RuntimeError, match="loopback only"):
        socket.getaddrinfo("example.org", 80)


def test_processes_stay_on_this_machine():
    pool(2).run(leave)


def fail(culprit):
    if dist.get_rank() == culprit:
        raise KeyError("lost")


def test_a_failure_comes_back_with_rank_and_traceback():
    with pytest.raises(RankError, match=r"(?s)^rank 1:.*in fail.*KeyError: 'lost'") as caught:
        pool(2).run(fail, 1)
    assert "rank 0" not in str(caught.value)


def answer_with_a_function():
    return lambda: None


def test_an_answer_that_cannot_travel_is_a_failure():
    with pytest.raises(RankError, match=r"(?s)rank 0:.*pickle.*rank 1:.*pickle"):
        pool(2).run(answer_with_a_function)


def die(culprit):
    if dist.get_rank() == culprit:
        os._exit(7)


def test_a_process_that_dies_is_named():
    with pytest.raises(RankError, match=r"^rank 0:\ndied \(exit code 7\)$"):
        pool(2).run(die, 0)


def crash(culprit):
    if dist.get_rank() == culprit:
        os.abort()


def test_a_process_that_crashes_is_named_with_its_stack():
    with pytest.raises(RankError, match=r"(?s)^rank 1:\ndied \(exit code -6\)\n.*Aborted.*in crash"):
        pool(2).run(crash, 1)


def hang(culprit):
    if dist.get_rank() == culprit:
        time.sleep(60)


def alive(pid):
    """A process that has ended and waits for its parent to notice is not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_stuck_process_is_named_with_its_stack_and_ended():
    before = pool(2).run(identity)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"(?s)^rank 1:\nstuck.*in hang") as caught:
        pool(2).run(hang, 1, timeout=1)
    assert time.monotonic() - start < 10
    assert "rank 0" not in str(caught.value)
    assert not any(alive(pid) for pid in before)
    after = pool(2).run(identity)  # others have taken their place
    assert not set(after) & set(before)


def test_closing_ends_every_process():
    one = Pool(2)
    pids = one.run(identity)
    assert all(alive(pid) for pid in pids)
    one.close()
    assert not any(alive(pid) for pid in pids)
    one.close()


SESSION = """
import multiprocessing.forkserver
import os
import pathlib
import time

from tests.ranks import pool

multiprocessing.context.BaseContext.set_forkserver_preload = lambda *_: None  # it would take longer than the rest

def identity():
    return os.getpid()

def hang():
    pathlib.Path("hanging").touch()
    time.sleep(100)

def test_that_fails():
    pids = [*pool(2).run(identity), multiprocessing.forkserver._forkserver._forkserver_pid]
    pathlib.Path("pids").write_text(" ".join(map(str, pids)))
    assert False

def test_that_is_interrupted():
    pool(2).run(hang)
"""


def test_a_session_that_fails_and_is_interrupted_leaves_no_process_behind(tmp_path, repository):
    """Ctrl-C goes to all processes of a terminal's foreground."""
    (tmp_path / "test_session.py").write_text(SESSION)
    session = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "no:cacheprovider", "test_session.py"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(repository)}, start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "hanging").exists() and time.monotonic() < deadline and session.poll() is None:
            time.sleep(0.05)
        os.killpg(session.pid, signal.SIGINT)
        output, _ = session.communicate(timeout=60)
    finally:
        session.kill()
    assert session.returncode == pytest.ExitCode.INTERRUPTED, output
    assert "1 failed" in output and "KeyboardInterrupt" in output
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    deadline = time.monotonic() + 5
    while any(alive(pid) for pid in pids) and time.monotonic() < deadline:  # the last one ends by itself
        time.sleep(0.05)
    assert len(pids) == 3 and not any(alive(pid) for pid in pids)

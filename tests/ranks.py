"""Functions on several gloo processes at once, bounded in time.

Processes are started once, by a fork server that has the heavy libraries loaded, and reused: ``pool(4).run(f, x)`` calls
``f(x)`` on 4 ranks and returns their results. Each process is set up as ``torchrun`` would, and in the default process
group, so that a Trainer made inside takes part without starting anything. Ranks that hang are named, with their stacks,
and the pool is replaced.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib.util
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GROUP_TIMEOUT = timedelta(seconds=60)
_POOLS: dict[int, Pool] = {}


def pool(ranks: int) -> Pool:
    """The processes of this size, started at the first call."""
    if ranks not in _POOLS:
        _POOLS[ranks] = Pool(ranks)
    return _POOLS[ranks]


def close_pools() -> None:
    """End every process."""
    for one in list(_POOLS.values()):
        one.close()
    _POOLS.clear()


class RankError(RuntimeError):
    """Some ranks failed or hang; the message holds each one's traceback."""


class Pool:
    """``ranks`` processes."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self._processes: list[Any] = []
        self._pipes: list[Any] = []

    def run(self, function: Callable[..., Any], *arguments: Any, timeout: float = 60.0) -> list[Any]:
        """``function(*arguments)`` on every rank -> results in their order. ``function``: at the top of a module below this
        repository. Errors: :class:`RankError` within ``timeout`` seconds (and the time to start the processes)."""
        if not self._processes:
            self._start()
        module = sys.modules[function.__module__]
        for pipe in self._pipes:
            pipe.send((str(module.__file__), module.__name__, function.__qualname__, arguments))
        replies = self._collect(time.monotonic() + timeout)
        failures = [f"rank {rank}:\n{reply[1]}" for rank, reply in enumerate(replies) if not reply[0]]
        if failures:
            self.close(patience=0.2)  # what failed may have left its peers out of step
            raise RankError("\n".join(failures))
        return [reply[1] for reply in replies]

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.rank_preload"])
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._stacks = tempfile.TemporaryDirectory()
        for rank in range(self.ranks):
            here, there = context.Pipe()
            process = context.Process(
                target=_work, args=(there, rank, self.ranks, port, self._stacks.name), daemon=True, name=f"rank {rank}"
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        self._collect(time.monotonic() + 90)

    def _collect(self, until: float) -> list[Any]:
        replies: list[Any] = []
        for rank, pipe in enumerate(self._pipes):
            try:
                if not pipe.poll(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                replies.append(pipe.recv())
            except (EOFError, ConnectionResetError):
                self._processes[rank].join(timeout=2)
                last = self._written_stack(rank)  # of a crash, as an abort in gloo; not of a kill
                replies.append((False, f"died (exit code {self._processes[rank].exitcode})" + f"\n{last}" * bool(last)))
            except TimeoutError:
                replies.append((False, f"stuck; it was in\n{self._stack(rank)}"))
        return replies

    def _stack(self, rank: int) -> str:
        os.kill(self._processes[rank].pid, signal.SIGUSR2)
        time.sleep(0.5)
        return self._written_stack(rank)

    def _written_stack(self, rank: int) -> str:
        return (Path(self._stacks.name) / str(rank)).read_text()

    def close(self, patience: float = 2.0) -> None:
        """End the processes: idle ones by themselves, within ``patience`` seconds each, others by force."""
        for pipe in self._pipes:
            pipe.close()  # an idle process takes it as the end
        for process in self._processes:
            process.join(timeout=patience)
            if process.is_alive():
                process.kill()
                process.join()
        if self._processes:
            self._stacks.cleanup()
        self._processes, self._pipes = [], []


def _work(pipe: Any, rank: int, ranks: int, port: int, stacks: str) -> None:
    """Life of one process: call what comes, until the pipe is closed."""
    import pytest
    import torch
    import torch.distributed as dist

    from tests.conftest import stay_on_this_machine

    stay_on_this_machine(pytest.MonkeyPatch())
    with open(Path(stacks) / str(rank), "w") as file:
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        faulthandler.enable(file)
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0",
            MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="tests", OMP_NUM_THREADS="1",
        )  # fmt: skip
        torch.set_num_threads(1)
        dist.init_process_group("gloo", rank=rank, world_size=ranks, timeout=GROUP_TIMEOUT)
        gc.freeze()
        pipe.send((True, None))
        while True:
            try:
                call = pipe.recv()
            except (EOFError, OSError):
                break
            _leave_groups()  # by now every rank has come out of the last call
            _reply(pipe, *_call(*call))
    os._exit(0)  # gloo's threads outlive sharded models at a normal exit


def _leave_groups() -> None:
    """Leave every process group but the default one: the threads of those that a call left open would keep a core busy."""
    import torch.distributed as dist
    from torch.distributed.tensor import debug

    gc.collect()  # a sharded model that outlived its groups would end the process
    everybody = dist.distributed_c10d._get_default_group()
    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not everybody]
    if any(group.size() < everybody.size() for group in groups):
        debug._clear_sharding_prop_cache()  # it remembers meshes, and an equal one would be taken for the one left
    for group in groups:
        dist.destroy_process_group(group)


def _reply(pipe: Any, succeeded: bool, result: Any) -> None:
    try:
        pipe.send((succeeded, result))
    except Exception:  # it cannot be pickled
        pipe.send((False, traceback.format_exc()))


def _call(file: str, module: str, name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
    import random

    import numpy
    import torch

    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    try:
        return True, getattr(_imported(file, module), name)(*arguments)
    except BaseException:
        return False, traceback.format_exc()


def _imported(file: str, module: str) -> Any:
    if module not in sys.modules:
        spec = importlib.util.spec_from_file_location(module, file)
        assert spec is not None and spec.loader is not None
        sys.modules[module] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[module])
    return sys.modules[module]


atexit.register(close_pools)

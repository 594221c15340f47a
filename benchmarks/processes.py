"""Run a function on several gloo processes of this machine, as ``torchrun`` would set them up."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(ranks: int, function: Callable[..., Any], *arguments: Any, timeout: float = 1800.0) -> Any:
    """``function(*arguments)`` on ``ranks`` processes of one thread each -> rank 0's result. ``function``: at the top of a
    module. Errors: ``RuntimeError`` with the failing rank's words, or after ``timeout`` seconds."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    here, there = context.Pipe(duplex=False)
    workers = [
        context.Process(target=_work, args=(rank, ranks, port, there if rank == 0 else None, function, arguments))
        for rank in range(ranks)
    ]
    return run_until_result(workers, here, there, timeout)


def run_until_result(workers: list[Any], here: Connection, there: Connection, timeout: float) -> Any:
    """Start processes, the first of which sends its result through ``there`` to ``here``, and end them all after it. Errors:
    as of :func:`on_ranks`."""
    try:
        for worker in workers:
            worker.start()
        there.close()
        return _first_result(here, workers, timeout)
    finally:
        for worker in workers:
            worker.kill()
            worker.join()


def _first_result(pipe: Connection, workers: list[Any], timeout: float) -> Any:
    """Rank 0's result; processes that have done their part may end before it is sent."""
    deadline, running = time.monotonic() + timeout, list(workers)
    while ready := wait([pipe, *(worker.sentinel for worker in running)], max(0.0, deadline - time.monotonic())):
        if pipe in ready:
            with suppress(EOFError):  # rank 0 died
                return pipe.recv()
            break
        for worker in workers:
            worker.join(timeout=0)
        if any(worker.exitcode for worker in workers):
            break
        running = [worker for worker in running if worker.exitcode is None]
    for worker in workers:
        worker.join(timeout=1)
    failed = [f"rank {rank} (exit code {w.exitcode})" for rank, w in enumerate(workers) if w.exitcode]
    raise RuntimeError(", ".join(failed) + " failed, see above" if failed else f"no result within {timeout:g} s")


def _work(
    rank: int, ranks: int, port: int, pipe: Connection | None, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID="benchmark",
    )  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    result = function(*arguments)
    dist.barrier()
    if pipe is not None:
        pipe.send(result)
        pipe.close()
    os._exit(0)  # gloo's threads outlive sharded models at a normal exit

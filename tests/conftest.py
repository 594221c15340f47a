"""Every test runs offline, on one thread, from fixed seeds."""

import os

os.environ["OMP_NUM_THREADS"] = (
    "1"  # also in what tests start: threads that wait for each other crawl on a busy machine
)
os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once
os.environ["TRANSFORMERS_OFFLINE"] = "1"

import ipaddress
import random
import socket
import sys
from pathlib import Path

import numpy
import pytest
import torch


class ConnectionRefusedByTests(RuntimeError):
    """No ``OSError``, so that no library takes it for a flaky network and carries on."""


def _is_loopback(host: object) -> bool:
    if host in (None, "", "localhost", b"localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(str(host)).is_loopback
    except ValueError:
        return False


def _refuse(target: object) -> None:
    raise ConnectionRefusedByTests(
        f"a test tried to reach {target!r}: tests may connect to loopback only; use local files or a stand-in"
    )


def stay_on_this_machine(patch: pytest.MonkeyPatch) -> None:
    """Refuse every connection and every name look-up that leaves it."""

    def guarded(method):
        def guard(self, address, *arguments):
            if self.family in (socket.AF_INET, socket.AF_INET6) and not _is_loopback(address[0]):
                _refuse(address)
            return method(self, address, *arguments)

        return guard

    look_up = socket.getaddrinfo

    def getaddrinfo(host, *arguments, **settings):
        if not _is_loopback(host):
            _refuse(host)
        return look_up(host, *arguments, **settings)

    patch.setattr(socket.socket, "connect", guarded(socket.socket.connect))
    patch.setattr(socket.socket, "connect_ex", guarded(socket.socket.connect_ex))
    patch.setattr(socket, "getaddrinfo", getaddrinfo)


@pytest.fixture(scope="session", autouse=True)
def loopback_only():
    with pytest.MonkeyPatch.context() as patch:
        stay_on_this_machine(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_process_left_behind():
    yield
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].close_pools()


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tests run side by side, and a sum's order must not depend on the machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_process_group_left_behind():
    """A Trainer that ran a strategy for several processes in this one leaves its group to the process's end."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def seeds():
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def repository() -> Path:
    """The repository's root folder."""
    return Path(__file__).resolve().parent.parent

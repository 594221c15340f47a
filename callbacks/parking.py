"""Make room on a device without anybody noticing: a module's bytes wait on the CPU for a while.

What is emptied and refilled are the storages themselves, so that whatever refers to them (parameters, the optimizer, averaged
weights, views saved in a recorded graph) finds the same tensors with the same bits afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def parkable(module: nn.Module) -> bool:
    """Whether there is room to be made: the module is on an accelerator, and not sharded."""
    tensors = [*module.parameters(), *module.buffers()]
    return any(t.device.type != "cpu" for t in tensors) and not any(isinstance(t, DTensor) for t in tensors)


@contextmanager
def parked(module: nn.Module) -> Iterator[None]:
    """Inside, the parameters and buffers of ``module`` take no memory where they are; nothing may use them. Afterwards, also
    after an exception, they are back, bit for bit. Storages that cannot be resized stay."""
    storages = (tensor.untyped_storage() for tensor in (*module.parameters(), *module.buffers()))
    waiting = []
    try:
        for storage in storages:
            if storage.resizable() and storage.nbytes():  # of several tensors on one storage, the first one does it
                waiting.append((storage, _copy(storage)))
                storage.resize_(0)
        yield
    finally:
        for storage, content in waiting:
            storage.resize_(content.nbytes())
            storage.copy_(content)


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return torch.UntypedStorage(storage.nbytes(), device="cpu").copy_(storage)

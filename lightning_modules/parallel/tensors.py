"""A parameter's values, whether it is a plain tensor or one that is sharded over ranks (a ``DTensor``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """All of it, as a plain tensor; a collective where it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class WholeTensors(Mapping[str, Tensor]):
    """The same tensors, each gathered only while it is looked at; ranks must look in the same order."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Tensor:
        return whole(self._tensors[name].detach())

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def laid_out_like(value: Tensor, parameter: Tensor) -> Tensor:
    """``value`` (whole and the same on every rank, or laid out so already) on the device and sharded as ``parameter`` is."""
    if not isinstance(parameter, DTensor):
        return value.to(parameter.device)
    if isinstance(value, DTensor):
        return value
    return distribute_tensor(
        value.to(parameter.device), parameter.device_mesh, parameter.placements, src_data_rank=None
    )


@contextmanager
def swapped_in(parameters: Mapping[str, nn.Parameter], values: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the parameters hold ``values``, laid out alike; afterwards, also after an exception, what they held before:
    the very tensors or, where they are sharded, the same bits (what shards a parameter keeps pointers into its memory)."""
    before = {name: _put(parameter, values[name]) for name, parameter in parameters.items()}
    try:
        yield
    finally:
        for name, parameter in parameters.items():
            _put(parameter, before[name])


@torch.no_grad()
def _put(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """What it held before."""
    if isinstance(parameter, DTensor):
        before = parameter.detach().clone()
        local(parameter).copy_(local(value))
    else:
        before, parameter.data = parameter.data, value.to(parameter.dtype)
    return before

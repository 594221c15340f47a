"""What a checkpoint holds of sharded parameters, and of whatever is laid out like them (an optimizer's moments, averages).

Two formats. *Gathered*: one file of whole tensors, the same whatever the number of ranks and the strategy. *Sharded*: a
folder to which every rank writes its own shards (``torch.distributed.checkpoint``), for a model whose whole state is too
much for the memory of one node; beside the shards lies ``tree.pt`` with everything else. Shards are safetensors, and of
``tree.pt`` only tensors and plain values are read, so that a folder cannot run code (torch's own index file is a pickle).

A *tree* is a nest of dicts, lists and tuples with tensors and plain values as its leaves.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, empty

TREE = "tree.pt"
"""File with all of a sharded checkpoint but its shards; without it the folder is not complete."""
PLACE, SHAPE = "shards of", "shape"
"""Keys of the dict that stands in ``tree.pt`` in a sharded tensor's place."""


def is_sharded(module: nn.Module) -> bool:
    """Whether some parameter of ``module`` is sharded over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in module.parameters())


def shard_count(module: nn.Module) -> int:
    """Number of ranks over which the parameters of ``module`` are sharded; 1 where they are whole."""
    meshes = (p.device_mesh for p in module.parameters() if isinstance(p, DTensor))
    return next((mesh.size(mesh.ndim - 1) for mesh in meshes), 1)


@torch.no_grad()
def gathered(tree: Any, keep: bool) -> Any:
    """``tree`` with every sharded tensor whole, on the CPU. A collective, one tensor at a time.

    Args:
        keep: whether this rank wants the values; elsewhere tensors are on the ``meta`` device, so that one rank's memory
            holds the whole and no other's.
    """

    def whole(tensor: Tensor, path: str) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        on_mesh: Any = tensor.detach().to(tensor.device_mesh.device_type)  # also shards that are kept on the CPU
        assert isinstance(on_mesh, DTensor)
        value = on_mesh.full_tensor()
        return value.cpu() if keep else torch.empty_like(value, device="meta")

    return _mapped(tree, whole)


def write_shards(tree: Any, folder: Path, first: bool) -> None:
    """Write ``tree`` to the existing ``folder``, all ranks together. ``first``: whether this rank writes ``tree.pt``; it
    does so last, looks whether everything is there, and waits until the disk has it. Errors: whatever the writing raises, on
    every rank if it is of shards."""
    shards: dict[str, Tensor] = {}

    def take(tensor: Tensor, path: str) -> Any:
        if not isinstance(tensor, DTensor):
            return tensor
        shards[path] = tensor.detach()
        return {PLACE: path, SHAPE: list(tensor.shape)}

    rest = _mapped(tree, take)
    save(shards, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    if first:
        with open(folder / TREE, "wb") as file:
            torch.save(rest, file)
        _stored(folder, rest)
        for path in (*folder.iterdir(), folder):
            _to_disk(path)


def _to_disk(path: Path) -> None:
    """Whichever rank has written it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_shards(folder: Path, mesh: DeviceMesh | None = None, device: torch.device | str = "cpu") -> Any:
    """The tree in ``folder``.

    Args:
        mesh: tensors are sharded over its last dimension, and every rank of it reads its own shards (a collective), on
            whatever number of ranks they were written; ``None``: whole tensors.
        device: where they go.

    Errors: ``ValueError`` if the folder holds no complete checkpoint.
    """
    if not (folder / TREE).is_file():
        raise ValueError(f"{folder} holds no complete checkpoint: {TREE} is missing; give another one of the same run")
    rest = torch.load(folder / TREE, map_location="cpu", weights_only=True)
    placements = [] if mesh is None else [Replicate()] * (mesh.ndim - 1) + [Shard(0)]
    shards: dict[str, Any] = {}
    for name, (shape, dtype) in _stored(folder, rest).items():
        if mesh is None:
            shards[name] = torch.empty(shape, dtype=dtype, device=device)
        else:
            shards[name] = empty(*shape, dtype=dtype, device_mesh=mesh, placements=placements)
    if shards:
        load(shards, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=mesh is None)
    return _filled(rest, shards)


def _stored(folder: Path, rest: Any) -> dict[str, tuple[list[int], torch.dtype]]:
    """Name -> shape and dtype of the sharded tensors of ``rest``. Errors: ``ValueError`` unless every element is there."""
    kinds: dict[str, Any] = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    found = {}
    for name, shape in _places(rest):
        held = sum(prod(chunk.sizes) for chunk in kinds[name].chunks) if name in kinds else 0
        if held != prod(shape):
            raise ValueError(f"{folder} holds {held} of the {prod(shape)} elements of {name}: give another checkpoint")
        found[name] = shape, kinds[name].properties.dtype
    return found


def _mapped(tree: Any, change: Callable[[Tensor, str], Any], path: str = "") -> Any:
    """``tree`` with ``change(tensor, its path)`` in the place of every tensor."""
    if isinstance(tree, Tensor):
        return change(tree, path)
    if isinstance(tree, dict):
        return {key: _mapped(value, change, f"{path}/{key}".lstrip("/")) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_mapped(value, change, f"{path}/{k}".lstrip("/")) for k, value in enumerate(tree))
    return tree


def _places(tree: Any) -> Iterator[tuple[str, list[int]]]:
    """(name, shape) of every sharded tensor."""
    if isinstance(tree, dict) and tree.keys() == {PLACE, SHAPE}:
        yield tree[PLACE], tree[SHAPE]
    elif isinstance(tree, (dict, list, tuple)):
        for part in tree.values() if isinstance(tree, dict) else tree:
            yield from _places(part)


def _filled(tree: Any, shards: dict[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() == {PLACE, SHAPE}:
            return shards[tree[PLACE]]
        return {key: _filled(value, shards) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(_filled(value, shards) for value in tree)
    return tree

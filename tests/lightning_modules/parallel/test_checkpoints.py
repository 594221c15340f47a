"""Trees of sharded tensors, gathered and written: the same values on any number of ranks, sharded or whole."""

import pickle
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lightning_modules.parallel.checkpoints import TREE, gathered, is_sharded, read_shards, shard_count, write_shards
from lightning_modules.parallel.tensors import whole
from tests.ranks import pool


def mesh(replicate=1):
    size = torch.distributed.get_world_size()
    if replicate == 1:
        return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))


def plain():
    """Rows that no number of ranks divides, fewer rows than ranks, a number type of each width, and things that are no
    tensors."""
    return {
        "weights": {"a.b": torch.arange(35.0).reshape(7, 5), "one row": torch.ones(1, 3, dtype=torch.bfloat16)},
        "states": [
            {0: {"moment": torch.linspace(0, 1, 11, dtype=torch.float64), "step": torch.tensor(3.0)}},
            (1, "x", None),
        ],
        "counter": 4,
    }


def sharded(replicate=1):
    tree, on = plain(), mesh(replicate)
    placements = [Shard(0)] if replicate == 1 else [Replicate(), Shard(0)]
    for holder, key in ((tree["weights"], "a.b"), (tree["weights"], "one row"), (tree["states"][0][0], "moment")):
        holder[key] = distribute_tensor(holder[key], on, placements)
    return tree


def assert_same(ours, theirs):
    assert type(ours) is type(theirs)
    if isinstance(ours, dict):
        assert list(ours) == list(theirs)
        for key in ours:
            assert_same(ours[key], theirs[key])
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            assert_same(*pair)
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    else:
        assert ours == theirs


def gather_both_ways(replicate):
    tree = sharded(replicate)
    kept, dropped = gathered(tree, keep=True), gathered(tree, keep=False)
    assert_same(kept, plain())
    assert dropped["weights"]["a.b"].is_meta and dropped["weights"]["a.b"].shape == (7, 5)
    assert dropped["states"][0][0]["step"] == 3 and dropped["counter"] == 4  # what is not sharded stays
    assert isinstance(tree["weights"]["a.b"], DTensor)


@pytest.mark.parametrize(("ranks", "replicate"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_gathered(ranks, replicate):
    pool(ranks).run(gather_both_ways, replicate)


def write(folder, replicate=1):
    write_shards(sharded(replicate), folder, first=torch.distributed.get_rank() == 0)


def read(folder, replicate):
    tree = read_shards(folder, mesh(replicate))
    read_now = tree["weights"]["a.b"]
    assert isinstance(read_now, DTensor) and read_now.placements[-1] == Shard(0)
    tree["weights"] = {name: whole(value) for name, value in tree["weights"].items()}
    tree["states"][0][0]["moment"] = whole(tree["states"][0][0]["moment"])
    assert_same(tree, plain())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Written on 4 ranks."""
    path = tmp_path_factory.mktemp("shards")
    pool(4).run(write, path)
    return path


@pytest.mark.parametrize(("ranks", "replicate"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_written_on_four_ranks_and_read_on_any_number(ranks, replicate, folder):
    pool(ranks).run(read, folder, replicate)


@pytest.mark.parametrize(("ranks", "replicate"), [(1, 1), (2, 1), (4, 2)])
def test_written_on_any_number_and_read_whole(ranks, replicate, tmp_path):
    pool(ranks).run(write, tmp_path, replicate)
    assert_same(read_shards(tmp_path), plain())


def test_a_folder_holds_no_code(folder):
    """``tree.pt`` is opened as weights only; the rest is safetensors."""
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".pt"}


def test_a_tree_that_would_run_code_is_refused(tmp_path):
    torch.save({"x": Path("x")}, tmp_path / TREE)
    with pytest.raises(pickle.UnpicklingError):
        read_shards(tmp_path)


@pytest.fixture
def spoilt(folder, tmp_path):
    """A copy of the folder to take things from."""
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


@pytest.mark.parametrize("index", [0, 1, -1], ids=["first", "second", "last"])
def test_a_missing_file_of_shards_is_found(index, spoilt):
    sorted(spoilt.glob("*.safetensors"))[index].unlink()
    with pytest.raises(ValueError, match=r"holds \d+ of the \d+ elements of .*: give another checkpoint"):
        read_shards(spoilt)


def test_a_folder_without_its_tree_is_incomplete(spoilt):
    (spoilt / TREE).unlink()
    with pytest.raises(ValueError, match=r"holds no complete checkpoint: tree\.pt is missing"):
        read_shards(spoilt)


def counts(replicate):
    layer = nn.Linear(4, 4)
    layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh(replicate)))
    return is_sharded(layer), shard_count(layer)


def test_what_counts_as_sharded():
    assert (is_sharded(nn.Linear(2, 2)), shard_count(nn.Linear(2, 2))) == (False, 1)
    assert pool(4).run(counts, 1) == [(True, 4)] * 4
    assert pool(4).run(counts, 2) == [(True, 2)] * 4

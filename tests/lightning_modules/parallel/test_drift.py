"""What has come apart between ranks is found, and where."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import Parameter

from lightning_modules.parallel.drift import check_same_on_all
from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.tensors import local
from tests.ranks import pool


def examine(parameters, facts=None):
    """The message of the refusal, or ``None``."""
    ranks = Ranks.connected(20)
    try:
        check_same_on_all(ranks, facts or {}, parameters)
        return None
    except ValueError as error:
        return str(error)
    finally:
        ranks.close()


def replicated(culprit, by, dtype):
    """Parameters that one rank has moved in a single element."""
    parameters = [Parameter(torch.ones(3, dtype=dtype)), Parameter(torch.tensor(2.0)), Parameter(torch.ones(2, 2))]
    if torch.distributed.get_rank() == culprit:
        with torch.no_grad():
            parameters[0][1] += by
    return examine(parameters)


@pytest.mark.parametrize(("dtype", "by"), [(torch.float32, 2**-23), (torch.bfloat16, 2**-7), (torch.float64, 2**-52)])
def test_one_unit_in_the_last_place_is_drift(dtype, by):
    messages = pool(4).run(replicated, 2, by, dtype)
    assert len(set(messages)) == 1
    assert "trained parameters are no longer the same on ranks [[0, 1, 3], [2]]" in messages[0]
    assert "resume from the last checkpoint" in messages[0]


def test_equal_parameters_pass():
    assert pool(4).run(replicated, 2, 0.0, torch.float32) == [None] * 4


def different_facts():
    rank = torch.distributed.get_rank()
    return examine([], {"the seed": 7, "the learning rate": [1e-4, 1e-4 if rank < 3 else 2e-4]})


def test_facts_that_differ_are_named():
    for message in pool(4).run(different_facts):
        assert message.startswith("the learning rate is not the same on all ranks: [0.0001, 0.0001] on rank 0")
        assert "[0.0001, 0.0002] on rank(s) [3]" in message


def sharded(replicate, culprit):
    """A sharded layer, the last row of one rank moved."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.manual_seed(0)
    layer = nn.Linear(2, 5)  # shards of 3 and 2 rows, or of 2, 2, 1 and none
    mesh = init_device_mesh("cpu", (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))
    fully_shard(layer, mesh=mesh if replicate > 1 else mesh["shard"])
    if rank == culprit:
        with torch.no_grad():
            local(layer.weight)[-1] += 1.0
    return examine(list(layer.parameters()))


def test_shards_differ_and_that_is_no_drift():
    assert pool(4).run(sharded, 1, None) == [None] * 4
    assert pool(4).run(sharded, 2, None) == [None] * 4


@pytest.mark.parametrize(("culprit", "apart"), [(3, "[[1], [3]]"), (0, "[[0], [2]]")])
def test_drift_between_replicas_of_a_shard(culprit, apart):
    """Ranks 0, 1 hold the shards of the first replica, ranks 2, 3 those of the second."""
    for message in pool(4).run(sharded, 2, culprit):
        assert f"no longer the same on ranks {apart}" in message


def test_a_single_process_has_nothing_to_compare():
    check_same_on_all(Ranks.alone(), {"anything": object()}, [])

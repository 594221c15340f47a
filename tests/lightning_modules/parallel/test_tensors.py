"""Values of parameters, whole and sharded."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_modules.parallel.tensors import WholeTensors, laid_out_like, local, swapped_in, whole
from tests.ranks import pool


def layer_of(replicate):
    """(values, layer): a layer of 5 rows, which 2 and 4 do not divide; sharded unless ``replicate`` is ``None``."""
    torch.manual_seed(0)
    layer = nn.Linear(3, 5)
    values = {name: p.detach().clone() for name, p in layer.named_parameters()}
    if replicate is not None:
        shape = (replicate, torch.distributed.get_world_size() // replicate)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
        fully_shard(layer, mesh=mesh if replicate > 1 else mesh["shard"], reshard_after_forward=True)
    return values, layer


def visit(replicate):
    """The layer's output before, while it holds other values, after an exception inside, and with what it held."""
    values, layer = layer_of(replicate)
    parameters = dict(layer.named_parameters())
    for name, p in parameters.items():
        assert torch.equal(whole(p.detach()), values[name])
        assert torch.equal(WholeTensors(parameters)[name], values[name])
        moved = laid_out_like(2 * values[name], p)
        assert torch.equal(local(moved), 2 * local(p.detach())) and isinstance(moved, DTensor) == isinstance(p, DTensor)
        assert laid_out_like(moved, p) is moved or not isinstance(p, DTensor)
    assert list(WholeTensors(parameters)) == list(parameters) and len(WholeTensors(parameters)) == 2
    others = {name: laid_out_like(2 * values[name], p) for name, p in parameters.items()}
    x, outputs = torch.ones(1, 3), []
    with torch.no_grad():
        outputs.append(layer(x))
        with pytest.raises(KeyError), swapped_in(parameters, others):
            outputs.append(layer(x))
            raise KeyError
        outputs.append(layer(x))
    assert all(now is parameters[name] for name, now in layer.named_parameters())
    return values, outputs


@pytest.mark.parametrize(("size", "replicate"), [(2, 1), (4, 1), (4, 2)])
def test_sharded_parameters_hold_other_values_for_a_while(size, replicate):
    values, outputs = visit(None)
    for theirs, seen in pool(size).run(visit, replicate):
        assert all(torch.equal(theirs[name], values[name]) for name in values)
        for ours, alone in zip(seen, outputs, strict=True):
            torch.testing.assert_close(ours, alone, rtol=0, atol=0)


def test_a_whole_parameter_holds_other_values_for_a_while():
    _, (before, inside, after) = visit(None)
    torch.testing.assert_close(inside, 2 * before)
    assert torch.equal(after, before)


def test_other_values_take_the_parameter_s_dtype():
    p = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
    with swapped_in({"p": p}, {"p": torch.full((2,), 1.5)}):
        assert p.dtype == torch.bfloat16 and p.tolist() == [1.5, 1.5]
    assert p.tolist() == [1.0, 1.0]

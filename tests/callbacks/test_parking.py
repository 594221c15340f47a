"""Parking is a matter of storages, so the CPU shows all of it but the device's name."""

import pytest
import torch
from torch import nn

from callbacks.parking import parkable, parked


def network():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 4, bias=False))
    model[2].weight = nn.Parameter(model[0].weight.detach().T)  # a view of another parameter's memory
    return model


def bits(model):
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def test_inside_nothing_is_held_and_afterwards_every_bit_is_back():
    model = network()
    before, storages = bits(model), [p.untyped_storage()._cdata for p in model.parameters()]
    with parked(model):
        assert all(t.untyped_storage().nbytes() == 0 for t in (*model.parameters(), *model.buffers()))
    assert [p.untyped_storage()._cdata for p in model.parameters()] == storages
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_also_after_an_exception():
    model = network()
    before = bits(model)
    with pytest.raises(OSError, match="reward"), parked(model):
        raise OSError("reward")
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_a_recorded_graph_the_optimizer_and_averages_never_notice():
    """Two models, one of which is parked between its forward and its backward."""
    plain, moved = network(), network()
    averages = {}
    for model in (plain, moved):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        averages[model] = [p.data for p in model.parameters()]  # other tensors on the same memory
        for _ in range(2):
            loss = model(torch.linspace(-1, 1, 12).reshape(3, 4)).square().sum()
            if model is moved:
                with parked(model):
                    pass
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    for a, b in zip(plain.parameters(), moved.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(averages[moved], moved.parameters(), strict=True))


def test_there_is_no_room_to_make_on_the_cpu():
    model = network()
    assert not parkable(model)
    assert parkable(model.to("meta"))

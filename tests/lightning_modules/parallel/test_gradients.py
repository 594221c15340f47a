"""Gradients held apart: redirected, scaled, delivered, and restored after an exception."""

import pytest
import torch

from lightning_modules.parallel.gradients import LocalGradients, Traffic
from tests.reductions import ORDERS, Setting, compare


def parameters():
    return [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]


def test_backward_goes_into_the_buffer_and_adds_up():
    p = parameters()
    gradients = LocalGradients(p)
    buffer = gradients.buffer()
    p[0].grad = torch.full((2,), 7.0)
    for _ in range(2):
        with gradients.into(buffer):
            (3 * p[0]).sum().backward()
    assert p[0].grad.tolist() == [7.0, 7.0]
    assert buffer.tensors[0].tolist() == [6.0, 6.0]
    assert buffer.tensors[1] is None
    assert not buffer.empty
    assert buffer.nbytes == 8


def test_an_exception_restores_what_was_there():
    p = parameters()
    gradients = LocalGradients(p)
    p[0].grad = torch.full((2,), 7.0)
    with pytest.raises(RuntimeError), gradients.into(gradients.buffer()):
        raise RuntimeError
    assert p[0].grad.tolist() == [7.0, 7.0]


def test_sums_are_wide_and_delivered_in_the_parameter_s_dtype():
    p = [torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))]
    gradients = LocalGradients(p)
    total, part = gradients.buffer(), gradients.buffer()
    part.tensors[0] = torch.full((1,), 1.0, dtype=torch.bfloat16)
    for _ in range(1000):
        total.add_(part, 0.001)  # a bf16 sum would stop growing at 0.25
    assert total.tensors[0].dtype == torch.float32
    assert total.tensors[0].item() == pytest.approx(1.0, rel=1e-4)
    gradients.deliver(total)
    assert p[0].grad.dtype == torch.bfloat16
    assert p[0].grad.item() == 1.0
    assert total.empty


def test_adding_does_not_alias_the_other_gradient():
    p = parameters()
    gradients = LocalGradients(p)
    total, part = gradients.buffer(), gradients.buffer()
    part.tensors[0] = torch.ones(2)
    total.add_(part, 2.0).mul_(3.0)
    assert part.tensors[0].tolist() == [1.0, 1.0]
    assert total.tensors[0].tolist() == [6.0, 6.0]


def test_one_process_hands_the_same_tensors_on_and_counts_nothing():
    gradients = LocalGradients(parameters())
    total = gradients.buffer()
    total.tensors[0] = held = torch.ones(2)
    reduced = gradients.reduce(total)
    assert total.empty
    assert reduced.tensors[0] is held and reduced.tensors[1] is None
    assert gradients.traffic == Traffic(reductions=0, collectives=0, bytes=0)


def test_traffic_adds_up():
    traffic = Traffic()
    traffic.sent(torch.zeros(3, dtype=torch.bfloat16))
    traffic.sent(torch.zeros(2))
    assert traffic == Traffic(reductions=0, collectives=2, bytes=6 + 8)


@pytest.mark.parametrize("order", ORDERS)
def test_the_gradient_of_all_rows_whatever_the_order(order):
    result = compare(Setting(kind="single", order=order, dtype=torch.float64))
    assert result["error"] < 1e-12
    assert result["gaps"] == ["idle"]
    assert result["alike"] and not result["stray"]


@pytest.mark.parametrize("model", ["full", "lora"])
def test_the_gradient_of_a_transformer(model):
    result = compare(Setting(kind="single", model=model, checkpointing=True))
    assert result["error"] < 5e-6

"""Replicated parameters: the sum over the ranks is what one process gets from everybody's rows."""

import pytest
import torch
from torch.nn import Parameter

from lightning_modules.parallel import summed
from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.replicated import ReplicatedGradients
from tests.ranks import pool
from tests.reductions import ORDERS, Setting, compare

EVERYTHING = 184
"""Elements of the tiny model that some rank's rows reach: 35 + 7 + 2 (49 + 7) + 21 + 3 + 6."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [2, 4])
def test_the_sum_of_all_ranks(size, order):
    for result in pool(size).run(compare, Setting(order=order, dtype=torch.float64)):
        assert result["error"] < 1e-12
        assert result["gaps"] == ["idle"]  # reached by nobody; the gate, by rank 0 alone, is there
        assert result["alike"] and not result["stray"]
        assert result["traffic"] == (1, 1, 8 * EVERYTHING)


@pytest.mark.parametrize(("model", "checkpointing"), [("full", False), ("lora", True)])
def test_a_transformer(model, checkpointing):
    for result in pool(2).run(compare, Setting(model=model, checkpointing=checkpointing, order="retain")):
        assert 0 < result["error"] < 5e-6  # sums in another order
        assert result["alike"] and not result["stray"]


@pytest.mark.parametrize(
    ("empty", "gaps", "elements"),
    [((1,), ["idle"], EVERYTHING), ((0, 2), ["gate", "idle"], EVERYTHING - 6)],
    ids=["one rank", "two ranks"],
)
def test_ranks_without_a_gradient_add_nothing(empty, gaps, elements):
    for result in pool(4).run(compare, Setting(empty=empty)):
        assert result["error"] < 5e-6
        assert result["gaps"] == gaps
        assert result["traffic"] == (1, 1, 4 * elements)


def test_where_all_are_empty_nothing_is_sent():
    for result in pool(2).run(compare, Setting(empty=(0, 1))):
        assert len(result["gaps"]) == 10
        assert result["traffic"] == (0, 0, 0)


def small_buckets():
    summed.BUCKET_BYTES, before = 200, summed.BUCKET_BYTES
    try:
        return compare(Setting())
    finally:
        summed.BUCKET_BYTES = before


def test_buckets_are_bounded():
    """In bytes: gate 24, first 140 + 28 | block 196 | 28 | block 196 | 28, last 84 + 12."""
    for result in pool(2).run(small_buckets):
        assert result["error"] < 5e-6
        assert result["traffic"] == (1, 5, 4 * EVERYTHING)


def added_in_bfloat16(values):
    """[R, n] float64, a row for each rank -> their sum, and the bytes sent."""
    ranks = Ranks.connected(20)
    gradients = ReplicatedGradients([Parameter(torch.zeros(len(values[0])))], ranks, torch.bfloat16)
    total = gradients.buffer()
    total.tensors[0] = values[ranks.rank].float()
    reduced = gradients.reduce(total).tensors[0]
    ranks.close()
    return reduced, gradients.traffic.bytes


@pytest.mark.parametrize("size", [2, 4])
def test_a_sum_in_bfloat16_is_within_the_stated_bound(size):
    """R terms and R - 1 partial sums are rounded, each by at most 2^-8 of its magnitude."""
    values = torch.randn(size, 2000, dtype=torch.float64).float().double()
    bound = size * 2**-8 * values.abs().sum(0) * (1 + size * 2**-8)
    for reduced, sent in pool(size).run(added_in_bfloat16, values):
        error = (reduced.double() - values.sum(0)).abs()
        assert reduced.dtype == torch.float32
        assert (error <= bound).all() and error.max() > 2**-9
        assert sent == 2 * 2000


def test_a_sum_in_bfloat16_by_hand():
    """1 + 2^-8 -> 1 (a tie, to even); 1 + 2^-7 + 2^-9 -> 1 + 2^-7; their sum 2 + 2^-7 -> 2 (a tie, to even)."""
    values = torch.tensor([[1 + 2**-8], [1 + 2**-7 + 2**-9]], dtype=torch.float64)
    for reduced, _ in pool(2).run(added_in_bfloat16, values):
        assert reduced.tolist() == [2.0]

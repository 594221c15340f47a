"""Distances against hand-worked vectors."""

import pytest
import torch

from benchmarks.metrics import distance, flatten


def test_hand_worked_vectors():
    d = distance(torch.tensor([3.0, 4.0]), torch.tensor([4.0, 3.0]))
    assert d.cosine == pytest.approx(24 / 25, abs=1e-15)
    assert d.relative_l2 == pytest.approx(2**0.5 / 5, abs=1e-15)
    assert d.max_abs == 1.0


def test_the_first_vector_is_the_reference():
    x, y = torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.0])
    assert distance(x, y).relative_l2 == 1.0
    assert distance(y, x).relative_l2 == 0.5


@pytest.mark.parametrize(
    ("y", "cosine", "relative"), [([0.5, 2.0], 1.0, 0.0), ([-0.5, -2.0], -1.0, 2.0), ([0.0, 0.0], 0.0, 1.0)]
)
def test_equal_opposite_and_zero(y, cosine, relative):
    d = distance(torch.tensor([0.5, 2.0]), torch.tensor(y))
    assert d.cosine == pytest.approx(cosine, abs=1e-15)
    assert d.relative_l2 == pytest.approx(relative, abs=1e-15)


def test_a_difference_below_float32_is_seen():
    x = torch.ones(3, dtype=torch.float64)
    assert distance(x, x + 1e-12).max_abs == pytest.approx(1e-12, rel=1e-3)


@pytest.mark.parametrize("x", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_nothing_to_compare_with(x):
    with pytest.raises(ValueError, match="nothing to compare"):
        distance(torch.tensor(x), torch.ones(2))


def test_vectors_of_other_length():
    with pytest.raises(ValueError, match=r"\(2,\) and \(3,\)"):
        distance(torch.ones(2), torch.ones(3))


def test_flatten_copies_in_order():
    parts = [torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16), torch.tensor(3.0)]
    flat = flatten(parts)
    parts[0].zero_()
    assert flat.dtype == torch.float64
    assert flat.tolist() == [1.0, 2.0, 3.0]

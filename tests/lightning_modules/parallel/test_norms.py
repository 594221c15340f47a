"""The global norm, whole and sharded, and clipping by it."""

import math

import pytest
import torch
from torch.nn import Parameter

from lightning_modules.parallel.norms import clip_grad_norm
from tests.ranks import pool
from tests.reductions import Setting, compare


def parameters(*gradients):
    made = [Parameter(torch.zeros(len(g), dtype=torch.float64)) for g in gradients]
    for p, g in zip(made, gradients, strict=True):
        p.grad = torch.tensor(g, dtype=torch.float64)
    return made


def test_by_hand():
    made = [*parameters([3.0, 0.0], [4.0]), Parameter(torch.zeros(2))]  # the last without a gradient
    assert clip_grad_norm(made, 1.0) == pytest.approx(5.0, abs=1e-12)
    assert made[0].grad.tolist() == pytest.approx([0.6, 0.0], rel=1e-6)
    assert made[1].grad.tolist() == pytest.approx([0.8], rel=1e-6)
    assert made[2].grad is None


@pytest.mark.parametrize("bound", [5.001, math.inf])
def test_within_the_bound_nothing_changes(bound):
    made = parameters([3.0], [4.0])
    assert clip_grad_norm(made, bound) == 5.0
    assert [p.grad.item() for p in made] == [3.0, 4.0]


def test_no_gradient_has_no_norm():
    assert clip_grad_norm([Parameter(torch.zeros(2))], 1.0) == 0.0


def test_what_is_not_finite_is_said():
    assert math.isnan(clip_grad_norm(parameters([math.nan], [1.0]), 1.0))
    assert clip_grad_norm(parameters([math.inf], [1.0]), math.inf) == math.inf


@pytest.mark.parametrize(
    ("size", "options"),
    [(2, {"kind": "replicated"}), (2, {"kind": "root"}), (4, {"kind": "nested"}), (4, {"kind": "nested", "replicate": 2})],
    ids=["replicated", "sharded", "nested", "two dimensions"],
)  # fmt: skip
def test_the_norm_of_shards_is_that_of_the_whole(size, options):
    """Clipped to half of it; 1e-6 is what clipping adds to the norm."""
    for result in pool(size).run(compare, Setting(dtype=torch.float64, **options)):
        assert result["norm"] < 1e-12
        assert result["clipped"] < 1e-6


def test_the_norm_of_a_sharded_transformer():
    for result in pool(2).run(compare, Setting(model="full", kind="nested")):
        assert result["norm"] < 5e-6
        assert result["clipped"] < 5e-6

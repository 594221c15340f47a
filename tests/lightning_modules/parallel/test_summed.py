"""Which gradients share a collective."""

import torch
from torch.nn import Parameter

from lightning_modules.parallel import summed
from lightning_modules.parallel.summed import buckets


def parameters(*sizes, dtype=torch.float32):
    return [Parameter(torch.zeros(size, dtype=dtype)) for size in sizes]


def test_consecutive_parameters_up_to_the_limit(monkeypatch):
    monkeypatch.setattr(summed, "BUCKET_BYTES", 100)
    assert list(buckets(range(5), parameters(10, 10, 10, 6, 10))) == [[0, 1], [2, 3], [4]]
    assert list(buckets([0, 2, 4], parameters(10, 10, 10, 6, 10))) == [[0, 2], [4]]
    assert list(buckets([0, 1, 2], parameters(10, 15, 1))) == [[0, 1], [2]]  # 100 bytes fit


def test_a_parameter_above_the_limit_is_alone(monkeypatch):
    monkeypatch.setattr(summed, "BUCKET_BYTES", 100)
    assert list(buckets(range(3), parameters(1, 1000, 1))) == [[0], [1], [2]]


def test_dtypes_are_kept_apart():
    mixed = [*parameters(1, 1), *parameters(1, dtype=torch.float64), *parameters(1)]
    assert list(buckets(range(4), mixed)) == [[0, 1], [2], [3]]


def test_nothing_is_no_bucket():
    assert list(buckets([], parameters(1))) == []

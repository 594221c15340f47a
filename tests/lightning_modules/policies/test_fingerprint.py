import pytest
import torch
from torch import nn

from lightning_modules.policies.fingerprint import SAMPLES, fingerprint, frozen_fingerprint

BASE = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(5)}


def test_equal_weights_have_one_name_in_any_order_and_layout():
    again = {"b": BASE["b"].clone(), "a": BASE["a"].t().contiguous().t()}
    assert fingerprint(again) == fingerprint(BASE) and len(fingerprint(BASE)) == 32


@pytest.mark.parametrize(
    "other",
    [
        {"a": BASE["a"] + torch.tensor([0.0, 0.0, 1e-6]), "b": BASE["b"]},  # one column, in its last digits
        {"a": BASE["a"].reshape(3, 2), "b": BASE["b"]},
        {"a": BASE["a"].double(), "b": BASE["b"]},
        {"A": BASE["a"], "b": BASE["b"]},
        {"a": BASE["a"]},
        {"a": BASE["a"], "b": BASE["b"], "c": torch.tensor(0.0)},
    ],
)
def test_other_weights_have_another(other):
    assert fingerprint(other) != fingerprint(BASE)


def elements_read(size):
    plain = fingerprint({"w": torch.zeros(size)})
    changed = torch.zeros(size)
    read = []
    for k in range(size):
        changed[k] = 1
        read += [k] if fingerprint({"w": changed}) != plain else []
        changed[k] = 0
    return read


@pytest.mark.parametrize(("size", "expected"), [(1, 1), (SAMPLES, SAMPLES), (SAMPLES + 1, SAMPLES // 2 + 1)])
def test_small_tensors_are_read_whole_large_ones_at_even_distances(size, expected):
    read = elements_read(size)
    assert len(read) == expected and len({b - a for a, b in zip(read, read[1:], strict=False)}) <= 1


def test_half_precision_empty_and_scalar_tensors():
    odd = {
        "h": torch.ones(3, dtype=torch.bfloat16),
        "e": torch.empty(0),
        "s": torch.tensor(3),
        "m": torch.tensor([True]),
    }
    assert fingerprint(odd) == fingerprint({k: v.clone() for k, v in odd.items()})
    assert fingerprint(odd) != fingerprint(odd | {"s": torch.tensor(4)})


def test_frozen_means_parameters_without_gradient_and_saved_buffers():
    module = nn.BatchNorm1d(2)
    before = frozen_fingerprint(module)
    with torch.no_grad():
        module.weight.add_(1)  # trained
    assert frozen_fingerprint(module) == before
    module.running_mean.add_(1)  # a buffer
    assert frozen_fingerprint(module) != before
    module.weight.requires_grad_(False)
    before = frozen_fingerprint(module)
    with torch.no_grad():
        module.weight.add_(1)
    assert frozen_fingerprint(module) != before

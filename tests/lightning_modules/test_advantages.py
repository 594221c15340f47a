"""Advantages against hand-worked values and NumPy, in every mode."""

import numpy as np
import pytest
import torch

from lightning_modules.advantages import GroupAdvantage

PROMPT = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
GENERATION = torch.arange(4).repeat(2)


def test_by_hand():
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 5.0, 5.0])  # mean 3, std sqrt(3.5)
    advantages = GroupAdvantage(eps=1e-12)(rewards, PROMPT, GENERATION)
    expected = torch.tensor([-2, -1, 0, 3], dtype=torch.float64) / 3.5**0.5
    torch.testing.assert_close(advantages.table[0], expected)
    assert advantages.table[1].tolist() == [0.0] * 4
    assert advantages.groups[0].mean == 3.0
    assert advantages.groups[1].scale == 0.0


@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("clip", [None, 0.7])
def test_every_mode_against_numpy(std, ddof, clip):
    rewards = torch.rand(8, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    estimator = GroupAdvantage(std=std, clip=clip, eps=1e-3, ddof=ddof)
    ours = estimator(rewards, PROMPT, GENERATION).of(PROMPT, GENERATION) * estimator.final_scale(rewards)
    r = rewards.numpy().reshape(2, 4)
    spread = {"group": r.std(axis=1, ddof=ddof, keepdims=True), "global": r.std(ddof=ddof), "none": 1 - 1e-3}[std]
    expected = (r - r.mean(axis=1, keepdims=True)) / (spread + 1e-3)
    if clip is not None:
        expected = np.clip(expected, -clip, clip)
    torch.testing.assert_close(ours, torch.from_numpy(expected.ravel()))


def test_equal_rewards_are_exactly_zero_where_the_rounded_mean_is_not():
    for value in (0.1, 0.21, 1 / 3, 85.7):
        for size in (3, 5, 6, 7, 11, 24):
            equal = torch.full((size,), value, dtype=torch.float32)
            ids = torch.zeros(size, dtype=torch.int64), torch.arange(size)
            for std in ("group", "global", "none"):
                assert not GroupAdvantage(std=std)(equal, *ids).table.any()


def test_groups_go_by_id_not_by_position():
    rewards = torch.rand(8, dtype=torch.float64)
    shuffle = torch.tensor([5, 0, 7, 2, 4, 1, 6, 3])
    straight = GroupAdvantage()(rewards, PROMPT, GENERATION)
    shuffled = GroupAdvantage()(rewards[shuffle], PROMPT[shuffle], GENERATION[shuffle])
    torch.testing.assert_close(straight.table, shuffled.table)


def test_a_dropped_sample_leaves_other_groups_alone():
    rewards = torch.rand(8, dtype=torch.float64)
    whole = GroupAdvantage()(rewards, PROMPT, GENERATION)
    dropped = rewards.clone()
    dropped[1] = torch.nan
    partial = GroupAdvantage()(dropped, PROMPT, GENERATION)
    assert partial.table[0, 1] == 0.0
    assert torch.equal(partial.table[1], whole.table[1])
    remaining = rewards[[0, 2, 3]]
    expected = (remaining - remaining.mean()) / (remaining.std(correction=0) + 1e-4)
    torch.testing.assert_close(partial.table[0, [0, 2, 3]], expected)
    assert partial.table.sum().abs() < 1e-9


@pytest.mark.parametrize(
    ("options", "generations", "affine"),
    [
        ({"clip": None, "std": "global"}, 64, True),
        ({"clip": 5.0}, 26, True),  # sqrt(26 - 1) = 5
        ({"clip": 5.0}, 27, False),
        ({"clip": 5.0, "ddof": 1}, 26, True),
        ({"clip": 5.0, "std": "global"}, 4, False),
        ({"clip": 5.0, "std": "none"}, 4, False),
    ],
)
def test_where_the_clip_cannot_fire(options, generations, affine):
    assert GroupAdvantage(**options).is_affine(generations) == affine


def test_the_largest_possible_advantage_meets_the_stated_bound():
    for ddof in (0, 1):
        for size in (2, 5, 26, 27):
            rewards = torch.zeros(size)
            rewards[0] = 1
            ids = torch.zeros(size, dtype=torch.int64), torch.arange(size)
            largest = GroupAdvantage(clip=None, eps=1e-15, ddof=ddof)(rewards, *ids).table.max().item()
            bound = (size - 1) ** 0.5 if ddof == 0 else (size - 1) / size**0.5
            assert largest == pytest.approx(bound)


@pytest.mark.parametrize("bad", [{"std": "batch"}, {"clip": 0.0}, {"eps": 0.0}, {"ddof": 2}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        GroupAdvantage(**bad)

"""Advantages against hand-worked values and NumPy, in every mode."""

import numpy as np
import pytest
import torch

from lightning_modules.advantages import GroupAdvantage, Rewards
from tests.lightning_modules.several_rewards import CASES, WEIGHTS, reference_advantages, rewards_of, table

PROMPT = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
GENERATION = torch.arange(4).repeat(2)


def test_by_hand():
    rewards = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0, 5.0, 5.0, 5.0])  # mean 3, std sqrt(3.5)
    advantages = GroupAdvantage(eps=1e-12)(rewards, PROMPT, GENERATION)
    expected = torch.tensor([-2, -1, 0, 3], dtype=torch.float64) / 3.5**0.5
    torch.testing.assert_close(advantages.table[0], expected)
    assert advantages.table[1].tolist() == [0.0] * 4
    assert advantages.groups[0][0].mean == 3.0
    assert advantages.groups[1][0].scale == 0.0


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


@pytest.mark.parametrize("bad", [{"std": "batch"}, {"clip": 0.0}, {"eps": 0.0}, {"ddof": 2}, {"combine": "product"}])
def test_bad_arguments(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        GroupAdvantage(**bad)


# several rewards


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("combine", ["sum", "advantage", "gdpo"])
def test_several_rewards_against_numpy(combine, std, ddof, clip, case):
    values, applies = table(case)
    rewards, prompt, generation = rewards_of(values, applies)
    estimator = GroupAdvantage(std=std, clip=clip, eps=1e-3, ddof=ddof, combine=combine)
    ours = estimator(rewards, prompt, generation).table * estimator.final_scale(rewards, prompt)
    expected = reference_advantages(
        values, applies, WEIGHTS, combine=combine, std=std, ddof=ddof, eps=1e-3, clip=clip
    )  # fmt: skip
    torch.testing.assert_close(ours, torch.from_numpy(expected), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("std", ["group", "global", "none"])
@pytest.mark.parametrize("combine", ["sum", "advantage", "gdpo"])
def test_the_affine_form_gives_the_advantages(combine, std):
    values, applies = table("routed and dropped")
    rewards, prompt, generation = rewards_of(values, applies)
    estimator = GroupAdvantage(std=std, clip=None, combine=combine)
    advantages, columns = estimator(rewards, prompt, generation), estimator.columns(rewards)
    dropped = ~rewards.valid
    assert columns[dropped].isnan().all()
    for position, terms in advantages.groups.items():
        group = (prompt == position) & ~dropped
        form = sum((columns[group, k] - term.mean) * term.scale for k, term in enumerate(terms))
        torch.testing.assert_close(form, advantages.of(prompt[group], generation[group]))
    assert not advantages.of(prompt[dropped], generation[dropped]).any()


def test_two_rewards_by_hand():
    """(0, 2) and (10, 30) are each normalised to (-1, 1); weighted by 1 and 3 they add up to (-4, 4)."""
    values = torch.tensor([[0.0, 10.0], [2.0, 30.0], [5.0, 7.0], [3.0, 7.0]], dtype=torch.float64)
    rewards = Rewards(values=values, applies=torch.ones(4, 2, dtype=torch.bool), weights=(1.0, 3.0))
    ids = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    apart = GroupAdvantage(clip=None, eps=1e-12, combine="advantage")(rewards, *ids)
    torch.testing.assert_close(apart.table, torch.tensor([[-4.0, 4.0], [1.0, -1.0]], dtype=torch.float64))
    gdpo = GroupAdvantage(clip=None, eps=1e-12, combine="gdpo")
    assert gdpo.final_scale(rewards, ids[0]) == pytest.approx(1 / 8.5**0.5)  # mean of 16, 16, 1, 1
    raw = GroupAdvantage(clip=None, eps=1e-12, std="none")(rewards, *ids)
    assert raw.table.tolist() == [[-31.0, 31.0], [1.0, -1.0]]


@pytest.mark.parametrize("case", CASES)
def test_the_batch_mean_that_gdpo_subtracts_is_zero_and_its_std_one(case):
    values, applies = table(case)
    rewards, prompt, generation = rewards_of(values, applies)
    for estimator in (GroupAdvantage(clip=None, combine="gdpo", eps=1e-12), GroupAdvantage(clip=9.0, combine="gdpo")):
        scale = estimator.final_scale(rewards, prompt)
        batch = estimator(rewards, prompt, generation).of(prompt, generation)[rewards.valid] * scale
        assert abs(batch.mean().item()) < 1e-13
        assert batch.std(correction=0).item() == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("std", ["group", "none"])
def test_one_reward_is_the_same_summed_or_apart(std):
    rewards = torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    summed, apart = (GroupAdvantage(std=std, combine=c)(rewards, PROMPT, GENERATION) for c in ("sum", "advantage"))
    assert torch.equal(summed.table, apart.table)


@pytest.mark.parametrize("combine", ["sum", "advantage", "gdpo"])
def test_rewards_equal_over_a_group_are_exactly_zero_there(combine):
    values, applies = table("whole")
    values[0] = [0.1, 1 / 3, 85.7]
    rewards, prompt, generation = rewards_of(values, applies)
    for std in ("group", "global", "none"):
        advantages = GroupAdvantage(std=std, combine=combine)(rewards, prompt, generation)
        assert advantages.table[0].tolist() == [0.0] * 4
        assert all(term.scale == 0.0 for term in advantages.groups[0])
        if combine != "sum":
            assert advantages.groups[1][1].scale == 0.0  # one of three: nothing of it is left
            assert advantages.groups[1][0].scale != 0.0


def test_a_reward_that_does_not_apply_adds_nothing_and_drops_nothing():
    values, applies = table("routed")
    rewards, prompt, generation = rewards_of(values, applies)
    assert rewards.valid.all()
    without, weights = np.delete(values[:1], 1, axis=2), (WEIGHTS[0], WEIGHTS[2])
    alone = rewards_of(without, np.ones((1, 2), dtype=bool), weights)
    for combine in ("sum", "advantage"):
        estimator = GroupAdvantage(clip=None, combine=combine)
        torch.testing.assert_close(estimator(rewards, prompt, generation).table[0], estimator(*alone).table[0])


def test_a_reward_for_a_part_of_a_group_is_refused():
    rewards, prompt, generation = rewards_of(*table("whole"))
    rewards.applies[5, 0] = False
    with pytest.raises(ValueError, match="some generations of prompt 1 only"):
        GroupAdvantage(combine="advantage")(rewards, prompt, generation)


@pytest.mark.parametrize(
    ("options", "deferred", "needs_iteration"),
    [
        ({"std": "group"}, False, False),
        ({"std": "global", "clip": None}, True, False),
        ({"std": "global"}, False, True),
        ({"combine": "advantage"}, False, False),
        ({"combine": "advantage", "std": "global", "clip": None}, False, True),  # a factor per reward, known at the end
        ({"combine": "gdpo", "clip": None}, True, False),
        ({"combine": "gdpo", "std": "none", "clip": None}, True, False),
        ({"combine": "gdpo", "std": "global", "clip": None}, False, True),
        ({"combine": "gdpo"}, False, True),
    ],
)
def test_when_advantages_are_known(options, deferred, needs_iteration):
    estimator = GroupAdvantage(**options)
    assert (estimator.deferred, estimator.needs_iteration) == (deferred, needs_iteration)


@pytest.mark.parametrize(
    ("options", "weights", "affine"),
    [
        ({"combine": "advantage"}, (0.5, -0.5), True),  # 1 * sqrt(26 - 1) = 5
        ({"combine": "advantage"}, (0.5, 0.6), False),
        ({"combine": "advantage"}, None, False),  # unknown: not certain
        ({"combine": "advantage", "clip": None}, None, True),
        ({"combine": "sum"}, (7.0, 9.0), True),  # normalised after the sum
        ({"combine": "gdpo"}, (0.1, 0.1), False),
        ({"combine": "gdpo", "clip": None}, (0.1, 0.1), True),
        ({"combine": "advantage", "std": "global"}, (0.1, 0.1), False),
    ],
)
def test_where_the_clip_cannot_fire_on_several_rewards(options, weights, affine):
    assert GroupAdvantage(**options).is_affine(26, weights) == affine


def test_the_bound_of_several_rewards_is_met():
    """All rewards single out the same sample, with the signs of their weights."""
    size, weights = 26, (0.5, -0.75)
    values = torch.zeros(size, 2, dtype=torch.float64)
    values[0] = torch.tensor([1.0, -1.0])
    rewards = Rewards(values=values, applies=torch.ones_like(values, dtype=torch.bool), weights=weights)
    ids = torch.zeros(size, dtype=torch.int64), torch.arange(size)
    apart = GroupAdvantage(clip=5.0, eps=1e-12, combine="advantage")(rewards, *ids)
    assert apart.clipped and apart.table.max() == 5.0
    within = GroupAdvantage(clip=6.25, eps=1e-15, combine="advantage")(rewards, *ids)
    assert within.table.max().item() == pytest.approx(1.25 * 5)
    assert not within.clipped

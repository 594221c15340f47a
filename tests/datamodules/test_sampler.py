from collections import Counter
from itertools import islice

import pytest
from torch.utils.data import DataLoader

from datamodules.sampler import PromptSampler

# P = 7, B = 3, seed 0. The first permutation is 2 1 0 5 4 3 6; the second starts inside the third step, without a 6.
PINNED = [[2, 1, 0], [5, 4, 3], [6, 0, 4], [6, 2, 3]]
SIZES = [(6, 2), (7, 3), (10, 4), (5, 4), (4, 3), (5, 5), (48, 20), (9, 1)]


def dealt(sampler: PromptSampler) -> list[int]:
    return [index for step in sampler for index in step]


@pytest.mark.parametrize(("pool", "per_step"), SIZES)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_permutation_uses_the_pool_up_and_no_step_repeats_a_prompt(pool, per_step, seed):
    sampler = PromptSampler(pool, per_step, iterations=5 * pool, seed=seed)
    steps = list(sampler)
    assert len(steps) == len(sampler) == 5 * pool
    assert all(len(step) == len(set(step)) == per_step for step in steps)
    stream = iter(dealt(sampler))
    for _ in range(5 * per_step):
        assert sorted(islice(stream, pool)) == list(range(pool))


def test_a_pool_smaller_than_a_step_is_dealt_evenly():
    steps = list(PromptSampler(3, 7, iterations=6, seed=0))
    assert all(set(Counter(step).values()) <= {2, 3} for step in steps)
    assert Counter(index for step in steps for index in step) == {0: 14, 1: 14, 2: 14}


@pytest.mark.parametrize(("pool", "per_step"), [*SIZES, (3, 7)])
def test_indices_are_a_function_of_seed_and_iteration_alone(pool, per_step):
    expected = list(PromptSampler(pool, per_step, iterations=60, seed=3))
    for iteration in (59, 0, 31, 17, 17, 2):  # any order, from one object and from fresh ones
        assert PromptSampler(pool, per_step, iterations=60, seed=3).indices(iteration) == expected[iteration]
    shared = PromptSampler(pool, per_step, iterations=60, seed=3)
    assert [shared.indices(i) for i in (59, 0, 31, 17, 17, 2)] == [expected[i] for i in (59, 0, 31, 17, 17, 2)]


@pytest.mark.parametrize("start", [0, 1, 13, 60])
def test_start_resumes_the_stream_and_leaves_the_length(start):
    sampler = PromptSampler(10, 4, iterations=60, seed=0, start=start)
    assert list(sampler) == list(PromptSampler(10, 4, iterations=60, seed=0))[start:]
    assert len(sampler) == 60


def test_order_is_stable_across_releases_and_depends_on_the_seed():
    assert list(PromptSampler(7, 3, iterations=4, seed=0)) == PINNED
    assert list(PromptSampler(7, 3, iterations=4, seed=1)) != PINNED


def test_every_prompt_can_come_first():
    first = Counter(PromptSampler(4, 2, iterations=1, seed=seed).indices(0)[0] for seed in range(400))
    assert all(60 < first[index] < 140 for index in range(4))  # 100 expected, sigma 8.7


@pytest.mark.parametrize("num_workers", [0, 2])
def test_right_with_workers_and_in_a_second_pass(num_workers):
    sampler = PromptSampler(10, 4, iterations=6, seed=0, start=1)
    loader = DataLoader(
        list(range(10)),
        batch_sampler=sampler,
        collate_fn=list,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )
    expected = list(PromptSampler(10, 4, iterations=6, seed=0))[1:]
    assert list(loader) == expected
    assert list(loader) == expected


@pytest.mark.parametrize("bad", ["num_prompts", "prompts_per_step", "iterations", "start"])
def test_sizes_are_checked(bad):
    sizes = {"num_prompts": 4, "prompts_per_step": 2, "iterations": 3, "start": 0} | {bad: -1}
    with pytest.raises(ValueError, match=f"{bad}=-1"):
        PromptSampler(**sizes, seed=0)
    with pytest.raises(ValueError, match="iteration=-1"):
        PromptSampler(4, 2, 3, seed=0).indices(-1)

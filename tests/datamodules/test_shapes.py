"""Pretraining batches: endless, keyed by (seed, index), the same for any number of workers."""

from itertools import islice

import pytest
import torch

from datamodules.shapes import ShapesData, ShapesScenes
from datamodules.shapes_world import enumerate_prompts, split_prompts


def take(data: ShapesData, count: int) -> list:
    return list(islice(iter(data.train_dataloader()), count))


def same(a, b) -> bool:
    return a["captions"] == b["captions"] and torch.equal(a["images"], b["images"])


def test_batches_hold_images_and_known_captions():
    (batch,) = take(ShapesData(batch_size=16), 1)
    assert batch["images"].shape == (16, 3, 32, 32) and batch["images"].dtype == torch.float32
    assert set(batch["captions"]) <= {row["prompt"] for row in enumerate_prompts()}


def test_batches_differ_and_repeat_with_the_seed():
    first, again, other = (take(ShapesData(batch_size=4, seed=seed), 2) for seed in (3, 3, 4))
    assert all(same(a, b) for a, b in zip(first, again, strict=True))
    assert not same(first[0], first[1]) and not same(first[0], other[0])


def test_workers_do_not_change_the_data():
    alone, shared = (take(ShapesData(batch_size=2, num_workers=n), 5) for n in (0, 2))
    assert all(same(a, b) for a, b in zip(alone, shared, strict=True))


def test_ranks_take_turns():
    everything = list(islice(ShapesScenes(batch_size=2, seed=0), 4))
    odd = list(islice(ShapesScenes(batch_size=2, seed=0, offset=1, stride=2), 2))
    assert same(odd[0], everything[1]) and same(odd[1], everything[3])


def test_categories_are_drawn_alike_and_heldout_prompts_never():
    tags = {row["prompt"]: row["tag"] for row in enumerate_prompts()}
    scenes = ShapesScenes(batch_size=600, seed=0)
    captions = scenes.batch(0)["captions"]
    for tag in set(tags.values()):  # binomial(600, 1/6): mean 100, standard deviation 9
        assert 60 < sum(tags[caption] == tag for caption in captions) < 140
    assert {row["prompt"] for row in split_prompts()[1]}.isdisjoint(captions)


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"seed": -1}, {"seed": 2**31}])
def test_bad_settings_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} {next(iter(bad.values()))}"):
        ShapesData(**bad)

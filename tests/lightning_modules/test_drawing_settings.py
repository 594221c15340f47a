"""Sampling under settings of an evaluation's own, and what a result file is told about it."""

import json

import pytest
import torch

from lightning_modules.flow.sigmas import ExplicitSigmas, LinearSigmas
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.types import DrawingSettings
from tests.loop import module
from tests.tiny import TinyPolicy


def sample(model, settings=None, seed=0):
    ids = torch.arange(3)
    return model.sample(
        ["a", "bb", "bb"], prompt_index=ids, image_index=ids, seed=seed, **({} if settings is None else {"settings": settings})
    )  # fmt: skip


def guided(scale=1.0, **options):
    return module(policy=ClassifierFreeGuidance(TinyPolicy(seed=1), scale, "z"), **options)


def test_steps_and_guidance_are_those_of_a_module_made_with_them():
    mine, other = guided(num_steps=4), guided(3.0, num_steps=4, eval_num_steps=7)
    before = sample(mine)
    drawn = sample(mine, DrawingSettings(num_steps=7, guidance=3.0))
    assert torch.equal(drawn, sample(other))
    assert not torch.allclose(drawn, before)
    assert torch.equal(sample(mine), before)
    assert mine.sampler(DrawingSettings(num_steps=7, guidance=3.0)) == other.sampler()


def test_settings_of_nothing_change_nothing():
    mine = guided(eval_num_steps=5)
    assert torch.equal(sample(mine, DrawingSettings()), sample(mine))


def test_the_sampler_is_told_in_plain_values():
    mine = guided(num_steps=2, sigmas=LinearSigmas(1.0))
    told = mine.sampler(DrawingSettings(num_steps=4, guidance=2.0))
    assert told["sigmas"] == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert (told["num_steps"], told["guidance"], told["negative_prompt"]) == (4, 2.0, "z")
    assert json.loads(json.dumps(told)) == told


def test_a_grid_that_cannot_have_these_steps_says_so():
    mine = guided(num_steps=2, sigmas=ExplicitSigmas([1.0, 0.5, 0.0]))
    with pytest.raises(ValueError, match="num_steps = 3"):
        mine.sampler(DrawingSettings(num_steps=3))


@pytest.mark.parametrize("name", ["num_steps", "height", "width"])
def test_settings_are_checked(name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        DrawingSettings(**{name: 0})


def test_weights_are_recognised():
    mine, same = module(), module()
    before = mine.identity()
    assert before == same.identity()
    assert json.loads(json.dumps(before)) == before
    with torch.no_grad():
        next(mine.policy.parameters()).add_(1e-3)
    after = mine.identity()
    assert after["trained_weights"] != before["trained_weights"]
    assert {k: v for k, v in after.items() if k != "trained_weights"} == {
        k: v for k, v in before.items() if k != "trained_weights"
    }


def test_weights_put_in_place_for_evaluation_are_those_told():
    from contextlib import contextmanager

    mine = module()
    raw = mine.identity()["trained_weights"]

    @contextmanager
    def shifted():
        with torch.no_grad():
            next(mine.policy.parameters()).add_(1.0)
            try:
                yield
            finally:
                next(mine.policy.parameters()).sub_(1.0)

    mine.evaluation_weights = shifted
    told = mine.identity()
    assert told["averaged"] and told["trained_weights"] != raw

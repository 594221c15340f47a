"""Evaluation draws with another guidance or at another size; training sees nothing of it."""

import json

import pytest
import torch

from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.policies.shapes import ShapesPolicy
from tests.tiny import TinyPolicy
from tests.tiny_models import FAMILIES, PROMPTS, SIZE, policy


def velocity(mine, prompts=PROMPTS):
    latents = torch.randn(len(prompts), *mine.latent_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return mine(latents, torch.full((len(prompts),), 0.5), mine.encode(prompts))


@pytest.mark.parametrize("family", FAMILIES)
def test_another_size_is_the_policy_made_for_that_size(family):
    side = SIZE[family]
    mine, other = policy(family), policy(family, height=3 * side, width=2 * side)
    before, shape, tokens = velocity(mine), mine.latent_shape, mine.num_tokens
    with mine.drawing_with(height=3 * side, width=2 * side):
        assert mine.latent_shape == other.latent_shape != shape
        assert mine.drawing() == other.drawing()
        torch.testing.assert_close(velocity(mine), velocity(other))
        assert mine.decode(torch.zeros(1, *mine.latent_shape)).shape[-2:] == (3 * side, 2 * side)
    assert (mine.latent_shape, mine.num_tokens) == (shape, tokens)
    assert torch.equal(velocity(mine), before)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_impossible_size_is_refused_and_leaves_no_trace(family):
    mine = policy(family)
    drawing, shape = mine.drawing(), mine.latent_shape
    wrong = 2 * SIZE[family] + 1
    with pytest.raises(ValueError, match=f"height={wrong}"), mine.drawing_with(height=wrong):
        pass
    assert (mine.drawing(), mine.latent_shape) == (drawing, shape)


def test_it_comes_back_after_an_error():
    guided = ClassifierFreeGuidance(policy("sd3"), 2.0, "blue")
    drawing = guided.drawing()
    with pytest.raises(RuntimeError), guided.drawing_with(guidance=5.0, height=12):
        assert guided.drawing() == drawing | {"guidance": 5.0, "height": 12}
        raise RuntimeError
    assert guided.drawing() == drawing


def test_guidance_in_evaluation_alone():
    """A policy trained without guidance (w = 1) draws as one that was made with w = 3."""
    inner = policy("sd3")
    unguided, guided = ClassifierFreeGuidance(inner, 1.0, "blue"), ClassifierFreeGuidance(inner, 3.0, "blue")
    before = velocity(unguided)
    with unguided.drawing_with(guidance=3.0):
        assert torch.equal(velocity(unguided), velocity(guided))
        assert not torch.allclose(velocity(unguided), before)
        assert unguided.drawing() == guided.drawing()
    assert torch.equal(velocity(unguided), before)
    assert "negative_prompt" not in unguided.drawing()


def test_embedded_guidance():
    mine, other = policy("flux", guidance=3.5), policy("flux", guidance=1.0)
    with mine.drawing_with(guidance=1.0):
        torch.testing.assert_close(velocity(mine), velocity(other))
    assert mine.guidance == 3.5
    with pytest.raises(ValueError, match="guidance=-1"), mine.drawing_with(guidance=-1.0):
        pass
    assert mine.guidance == 3.5
    assert ClassifierFreeGuidance(mine, 2.0).drawing()["inner_guidance"] == 3.5


@pytest.mark.parametrize(
    ("make", "changes", "message"),
    [
        (TinyPolicy, {"guidance": 2.0}, "guidance=2.0: TinyPolicy draws with 1.0 only; wrap it in ClassifierFreeGuidance"),
        (lambda: policy("sd3"), {"guidance": 2.0}, "wrap it in ClassifierFreeGuidance with scale: 1"),
        (lambda: policy("flux", guidance=3.5), {"width": 7}, "width=7"),
        (lambda: ShapesPolicy(None, num_layers=1, width=8, num_heads=2), {"height": 64}, "height=64: .* draws with 32 only"),
        (lambda: ClassifierFreeGuidance(TinyPolicy(), 1.0), {"guidance": -1.0}, "scale=-1.0"),
    ],
)  # fmt: skip
def test_what_a_policy_cannot_change_is_refused(make, changes, message):
    with pytest.raises(ValueError, match=message), make().drawing_with(**changes):
        pass


def test_what_it_draws_with_already_changes_nothing():
    mine = ShapesPolicy(None, num_layers=1, width=8, num_heads=2)
    with mine.drawing_with(guidance=1.0, height=32, width=32):
        assert mine.drawing() == {"guidance": 1.0, "height": 32, "width": 32}


@pytest.mark.parametrize("family", FAMILIES)
def test_identities_are_plain_values(family):
    mine = policy(family)
    identity = mine.identity()
    assert json.loads(json.dumps(identity)) == identity
    assert identity["class"].endswith(type(mine).__name__)
    assert json.loads(json.dumps(mine.drawing())) == mine.drawing()
    assert policy(family, trainable="full").identity()["trained"] == "full" != identity["trained"]
    assert ClassifierFreeGuidance(mine, 2.0).identity() == identity

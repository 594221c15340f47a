import math

import pytest
import torch

from lightning_modules.policies.guidance import ClassifierFreeGuidance
from tests.tiny import TinyPolicy
from tests.tiny_models import PROMPTS, move, pipeline, policy


class Counting(TinyPolicy):
    """In float64; keeps the prompts it encodes and the rows of every call."""

    def __init__(self):
        super().__init__(seed=3)
        self.double().eval()
        self.encoded, self.rows = [], []

    def encode(self, prompts):
        self.encoded.append(list(prompts))
        return super().encode(prompts)

    def forward(self, latents, sigma, conditioning):
        self.rows.append(len(latents))
        return super().forward(latents, sigma, conditioning)


def inputs(inner, n=3):
    return torch.randn(n, *inner.latent_shape, dtype=torch.float64), torch.rand(n, dtype=torch.float64)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("scale", [0.0, 0.5, 1.0, 4.5])
def test_the_formula(scale, batched):
    inner = Counting()
    guided = ClassifierFreeGuidance(inner, scale, "bad", batched)
    x, sigma = inputs(inner)
    conditioning = guided.encode(["a", "bb", "ccc"])
    towards, away = (inner(x, sigma, inner.encode(p)) for p in (["a", "bb", "ccc"], ["bad"] * 3))
    inner.rows.clear()
    velocity = guided(x, sigma, conditioning)
    torch.testing.assert_close(velocity, away + scale * (towards - away), rtol=1e-12, atol=1e-12)
    assert inner.rows == ([3] if scale == 1 else [6] if batched else [3, 3])


@pytest.mark.parametrize("batched", [True, False])
def test_gradients_flow_through_both_branches(batched):
    """d/d theta of <v, c> by central differences along a random direction of all parameters."""
    inner = Counting()
    guided = ClassifierFreeGuidance(inner, 4.5, "bad", batched)
    x, sigma = inputs(inner)
    conditioning, direction = guided.encode(["a", "bb", "ccc"]), [torch.randn_like(p) for p in inner.parameters()]
    weights = torch.randn_like(x)

    def objective():
        return (guided(x, sigma, conditioning) * weights).sum()

    def moved(by):
        with torch.no_grad():
            for p, d in zip(inner.parameters(), direction, strict=True):
                p.add_(d, alpha=by)
            value = objective().item()
            for p, d in zip(inner.parameters(), direction, strict=True):
                p.sub_(d, alpha=by)
        return value

    gradients = torch.autograd.grad(objective(), list(inner.parameters()))
    slope = sum((g * d).sum().item() for g, d in zip(gradients, direction, strict=True))
    assert slope == pytest.approx((moved(1e-5) - moved(-1e-5)) / 2e-5, rel=1e-6)


def test_the_negative_prompt_is_encoded_once():
    inner = Counting()
    guided = ClassifierFreeGuidance(inner, 2.0, "bad")
    guided.encode(["a", "b"])
    guided.encode(["c"])
    assert inner.encoded == [["a", "b"], ["bad"], ["c"]]
    unguided = ClassifierFreeGuidance(Counting(), 1.0, "bad")
    assert set(unguided.encode(["a"]).tensors) == {"code"}
    assert unguided.policy.encoded == [["a"]]


def test_rows_of_the_conditioning_can_be_picked_and_repeated():
    inner = Counting()
    guided = ClassifierFreeGuidance(inner, 2.0)
    x, sigma = inputs(inner, 4)
    picked = guided.encode(["a", "bb"]).rows(torch.tensor([0, 1, 1, 0]))
    torch.testing.assert_close(
        guided(x, sigma, picked), guided(x, sigma, guided.encode(["a", "bb", "bb", "a"])), rtol=0, atol=0
    )


def test_it_is_the_wrapped_policy_in_everything_else():
    inner = policy("sd3")
    guided = ClassifierFreeGuidance(inner, 4.5)
    assert (guided.latent_shape, guided.num_tokens) == (inner.latent_shape, inner.num_tokens)
    latents = torch.randn(2, *inner.latent_shape)
    assert torch.equal(guided.decode(latents), inner.decode(latents))
    assert {name.removeprefix("policy.") for name in guided.state_dict()} == set(inner.state_dict())


@pytest.mark.parametrize("batched", [True, False])
def test_the_reference_is_guided_too_and_stays_where_it_was(batched):
    guided = ClassifierFreeGuidance(policy("sd3"), 4.5, batched=batched)
    x, sigma, conditioning = torch.randn(2, *guided.latent_shape), torch.full((2,), 0.5), guided.encode(PROMPTS[:2])
    start, reference = guided(x, sigma, conditioning).detach(), guided.reference()
    with torch.no_grad():
        for parameter in guided.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3)
    assert torch.equal(reference(x, sigma, conditioning), start)
    assert not torch.allclose(guided(x, sigma, conditioning), start, atol=1e-3)


def test_what_validation_encoded_can_be_trained_on():
    guided = ClassifierFreeGuidance(policy("sd3"), 4.5)
    with torch.inference_mode():
        guided.encode(["cross"])
    conditioning = guided.encode(["cross"])
    guided(torch.randn(1, *guided.latent_shape), torch.ones(1), conditioning).sum().backward()
    assert any(p.grad is not None for p in guided.parameters())


@pytest.mark.parametrize("scale", [-0.1, math.inf, math.nan])
def test_an_impossible_scale_is_refused(scale):
    with pytest.raises(ValueError, match=f"scale={scale}.*1 is no guidance"):
        ClassifierFreeGuidance(Counting(), scale)


def test_guidance_of_guidance_is_refused():
    with pytest.raises(ValueError, match="guided already"):
        ClassifierFreeGuidance(ClassifierFreeGuidance(Counting(), 2.0), 3.0)


def apart(mine, prompts, dtype):
    """Largest difference of a velocity in a batch from the same one alone."""
    x = torch.randn(len(prompts), *mine.latent_shape, dtype=dtype)
    sigma = torch.full((len(prompts),), 0.7, dtype=dtype)
    together = mine(x, sigma, mine.encode(prompts))
    alone = [mine(x[n : n + 1], sigma[:1], mine.encode([prompt])) for n, prompt in enumerate(prompts)]
    return (together - torch.cat(alone)).abs().max().item()


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("family", ["sd3", "wan21", "wan22"])
def test_prompts_of_different_lengths_do_not_change_one_another(family, batched):
    """In fp32 each branch to 1e-6, which guidance multiplies by ``w`` and ``w - 1``. That it is rounding and no leak of
    padding shows in float64, encoders included, where nothing of it is left."""
    scale, prompts, negative = 4.5, list(PROMPTS), "blue square left of two"
    inner = policy(family, pipeline(family)).eval()
    move(inner)
    guided = ClassifierFreeGuidance(inner, scale, negative, batched)
    assert apart(inner, prompts, torch.float32) <= 1e-6 and apart(inner, [negative] * 3, torch.float32) <= 1e-6
    assert apart(guided, prompts, torch.float32) <= (2 * scale - 1) * 1e-6
    for encoder in inner.text.modules.values():
        encoder.double()
    guided = ClassifierFreeGuidance(inner.double(), scale, negative, batched)
    assert apart(guided, prompts, torch.float64) <= 1e-12

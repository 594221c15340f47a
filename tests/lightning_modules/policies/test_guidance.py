import math

import pytest
import torch

from lightning_modules.policies.guidance import ClassifierFreeGuidance
from tests.tiny import TinyPolicy
from tests.tiny_models import PROMPTS, policy


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


@pytest.mark.parametrize("family", ["sd3", "wan21", "wan22"])
def test_prompts_of_different_lengths_do_not_change_one_another_under_guidance(family):
    """In float64, where rounding cannot hide a leak: a scale of 4.5 amplifies what the branches differ by in fp32, which
    is below 1e-6 each."""
    inner = policy(family).eval()
    guided = ClassifierFreeGuidance(inner, 4.5, "blue").double()
    x = torch.randn(3, *guided.latent_shape, dtype=torch.float64)
    sigma = torch.full((3,), 0.7, dtype=torch.float64)
    together = guided(x, sigma, guided.encode(PROMPTS))
    for n, prompt in enumerate(PROMPTS):
        alone = guided(x[n : n + 1], sigma[:1], guided.encode([prompt]))
        torch.testing.assert_close(together[n : n + 1], alone, rtol=0, atol=1e-6)
    guided.float()
    x, sigma = x.float(), sigma.float()
    for prompts in (PROMPTS, ["blue"] * 3):
        branch = inner(x, sigma, inner.encode(prompts))
        for n, prompt in enumerate(prompts):
            alone = inner(x[n : n + 1], sigma[:1], inner.encode([prompt]))
            torch.testing.assert_close(branch[n : n + 1], alone, rtol=0, atol=1e-6)

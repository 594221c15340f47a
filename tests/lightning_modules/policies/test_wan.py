import pytest
import torch

from lightning_modules.policies.wan import WanPolicy
from tests.tiny_models import TOKENS, policy, wan_transformer


@pytest.mark.parametrize(
    ("family", "size", "latent", "tokens"),
    [
        ("wan21", (32, 48, 1), (4, 1, 4, 6), 1 * 2 * 3),
        ("wan21", (32, 48, 9), (4, 3, 4, 6), 3 * 2 * 3),
        ("wan22", (64, 96, 5), (4, 2, 4, 6), 2 * 2 * 3),
    ],
)
def test_size_of_latents_and_tokens(family, size, latent, tokens):
    height, width, frames = size
    wan = policy(family, height=height, width=width, frames=frames)
    assert (wan.latent_shape, wan.num_tokens) == (latent, tokens)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("wan21", {"height": 24}, "height=24 is no multiple of 16: choose 16 or 32"),
        ("wan22", {"width": 48}, "width=48 is no multiple of 32: choose 32 or 64"),
        *[("wan21", {"frames": f}, f"frames={f} is not 4 k \\+ 1: choose 1 or 5") for f in (-3, 0, 2, 4)],
        ("wan21", {"frames": 8}, "frames=8 is not 4 k \\+ 1: choose 5 or 9"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(family, options, message):
    with pytest.raises(ValueError, match=message):
        policy(family, **options)


def test_released_scale_is_assumed_without_a_vae():
    wan = WanPolicy(transformer=wan_transformer(), text=None, vae=None, height=16, width=32, frames=5)
    assert wan.latent_shape == (4, 2, 2, 4)


def test_scaling_is_undone_channel_by_channel():
    wan = policy("wan21")
    by_hand = torch.tensor([1 * 2.8 - 0.7, 1 * 1.4 + 0.3, 1 * 0.9 + 0.1, 1 * 1.7 - 0.2])
    torch.testing.assert_close(wan.unscale(torch.ones(1, 4, 2, 1, 1))[0, :, 1, 0, 0], by_hand)


def test_embeddings_of_padding_are_zero():
    text = policy("wan21").encode(["a red circle", "cross"]).tensors["text"]
    assert text.shape == (2, TOKENS, 24)
    lengths = text.abs().sum(-1).ne(0).sum(1).tolist()
    assert lengths == [4, 2]  # words and the end of the text


def test_rotary_frequencies_and_norms_stay_in_fp32_when_the_rest_is_cast():
    """bf16 would make neighbouring positions one; the trainer's bf16-true casts the whole module."""
    wan, before = policy("wan21", trainable="full"), policy("wan21").transformer.rope.freqs_cos.clone()
    wan.to(torch.bfloat16)
    transformer = wan.transformer
    assert transformer.rope.freqs_cos.dtype == torch.float32 and torch.equal(transformer.rope.freqs_cos, before)
    assert transformer.scale_shift_table.dtype == transformer.blocks[0].norm2.weight.dtype == torch.float32
    assert transformer.patch_embedding.weight.dtype == transformer.dtype == torch.bfloat16
    out = wan(torch.randn(1, *wan.latent_shape), torch.full((1,), 0.5), wan.encode(["cross"]))
    assert out.dtype == torch.float32 and out.isfinite().all()
    assert wan.double().transformer.rope.freqs_cos.dtype == torch.float64

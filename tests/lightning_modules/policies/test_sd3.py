import pytest
import torch

from tests.tiny_models import components, policy, sd3_transformer


def test_size_of_latents_and_tokens():
    """VAE factor 2, patch 2: 12 x 8 pixels are 6 x 4 latent pixels and 3 x 2 tokens."""
    wide = policy("sd3", height=12, width=8)
    assert (wide.latent_shape, wide.num_tokens) == ((4, 6, 4), 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 10}, "height=10 is no multiple of 4: choose 8 or 12"),
        ({"width": 3}, "width=3 is no multiple of 4: choose 4 or 8"),
        ({"height": 36}, "height=36 exceeds the model's position table: at most 32"),
        ({"frames": 5}, "frames=5: SD3Policy makes images; set frames: 1"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        policy("sd3", **options)


def test_released_scale_is_assumed_without_a_vae():
    from lightning_modules.policies.sd3 import SD3Policy

    assert SD3Policy(transformer=sd3_transformer(), text=None, vae=None, height=32, width=16).latent_shape == (4, 4, 2)


def test_scaling_is_undone_before_the_vae():
    sd3 = policy("sd3")
    latents = torch.randn(1, *sd3.latent_shape)
    torch.testing.assert_close((sd3.unscale(latents) - 0.0609) * 1.5305, latents)


def test_text_is_clip_then_t5_and_pooled_clip():
    """10 of the 36 CLIP tokens are letters; the narrow CLIP rows are padded with zeros to T5's width."""
    tensors = policy("sd3").encode(["a red circle", "cross"]).tensors
    assert tensors["text"].shape == (2, 36 + 12, 24) and tensors["pooled"].shape == (2, 16)
    assert not tensors["text"][:, :36, 16:].any() and tensors["text"][:, :36, :16].any()
    parts = components("sd3")
    ids = parts["tokenizer"](["cross"], padding="max_length", max_length=36, return_tensors="pt").input_ids
    torch.testing.assert_close(tensors["pooled"][1, :8], parts["text_encoder"](ids)[0][0], rtol=1e-5, atol=1e-6)

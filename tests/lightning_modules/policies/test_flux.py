import pytest
import torch

from lightning_modules.policies.flux import FluxPolicy, pack, positions, unpack
from tests.tiny_models import PROMPTS, flux_transformer, policy


def test_packing_by_hand():
    """Two channels of 2 x 4: two tokens, each a channel's 2 x 2 after the other's."""
    x = torch.tensor([[[[0, 1, 2, 3], [4, 5, 6, 7]], [[10, 11, 12, 13], [14, 15, 16, 17]]]])
    tokens = [[0, 1, 4, 5, 10, 11, 14, 15], [2, 3, 6, 7, 12, 13, 16, 17]]
    assert pack(x).tolist() == [tokens]
    assert torch.equal(unpack(pack(x), 2, 4), x)


def test_packing_is_diffusers():
    from diffusers import FluxPipeline

    x = torch.randn(2, 3, 6, 4)
    assert torch.equal(pack(x), FluxPipeline._pack_latents(x, 2, 3, 6, 4))
    assert torch.equal(positions(3, 2, x.device), FluxPipeline._prepare_latent_image_ids(2, 3, 2, "cpu", torch.float32))


def test_size_of_latents_and_tokens():
    tall = policy("flux", height=12, width=8)
    assert (tall.latent_shape, tall.num_tokens) == ((4, 6, 4), 6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"height": 10}, "height=10 is no multiple of 4: choose 8 or 12"),
        ({"frames": 5}, "frames=5: FluxPolicy makes images; set frames: 1"),
    ],
)
def test_a_size_that_does_not_fit_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        policy("flux", **options)


def test_every_guidance_means_something_else():
    """0, 1 and 3.5 are three inputs of a guidance-distilled model; none at all is for a model without."""
    velocities, seen = {}, []
    for guidance in (0.0, 1.0, 3.5):
        flux = policy("flux", guidance=guidance)
        flux.transformer.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["guidance"]), with_kwargs=True)
        x, sigma = torch.ones(1, *flux.latent_shape), torch.full((1,), 0.5)
        velocities[guidance] = flux(x, sigma, flux.encode(["cross"])).detach()
        assert seen[-1].tolist() == [guidance]
    assert (velocities[0.0] - velocities[1.0]).abs().max() > 1e-4
    assert (velocities[1.0] - velocities[3.5]).abs().max() > 1e-4

    plain = flux_transformer(guidance_embeds=False)
    schnell = FluxPolicy(transformer=plain, text=None, vae=None, height=32, width=32, guidance=None)
    plain.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["guidance"]), with_kwargs=True)
    schnell(torch.ones(1, 4, 4, 4), torch.ones(1), policy("flux").encode(["cross"]))
    assert seen[-1] is None


@pytest.mark.parametrize("guidance", [0.0, 1.0])
def test_guidance_for_a_model_without_it_is_refused(guidance):
    with pytest.raises(ValueError, match=f"guidance={guidance}, but this transformer embeds none: set guidance: null"):
        FluxPolicy(
            transformer=flux_transformer(guidance_embeds=False), text=None, vae=None, height=32, width=32, guidance=guidance
        )  # fmt: skip


def test_no_guidance_for_a_model_with_it_is_refused():
    with pytest.raises(ValueError, match="guidance=None.*give a number, 3.5 as released"):
        policy("flux", guidance=None)


def test_rows_of_a_batch_do_not_mix():
    flux = policy("flux").eval()
    x, sigma = torch.randn(3, *flux.latent_shape), torch.tensor([0.9, 0.5, 0.1])
    together = flux(x, sigma, flux.encode(PROMPTS))
    for n, prompt in enumerate(PROMPTS):
        alone = flux(x[n : n + 1], sigma[n : n + 1], flux.encode([prompt]))
        torch.testing.assert_close(together[n : n + 1], alone, rtol=0, atol=1e-6)

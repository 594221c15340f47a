"""What the families share."""

import copy

import pytest
import torch
from diffusers import AutoencoderKL

from lightning_modules.flow.transitions import FlowSDE
from lightning_modules.policies.text import TextEncoder
from lightning_modules.schedules.native import Native
from tests.harness import Update
from tests.tiny_models import (
    FAMILIES,
    POLICIES,
    PROMPTS,
    TOKENS,
    flux_transformer,
    image_vae,
    move,
    pipeline,
    policy,
    sd3_transformer,
    tiny_lora,
    video_vae,
    wan_transformer,
)


def call(mine, prompts=("cross",), sigma=0.5, dtype=torch.float32):
    n = len(prompts)
    latents = torch.randn(n, *mine.latent_shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    return mine(latents, torch.full((n,), sigma), mine.encode(list(prompts)))


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_of_different_lengths_do_not_change_one_another(family):
    mine = policy(family).eval()
    x = torch.randn(3, *mine.latent_shape)
    sigma = torch.full((3,), 0.7)
    together = mine(x, sigma, mine.encode(PROMPTS))
    for n, prompt in enumerate(PROMPTS):
        alone = mine(x[n : n + 1], sigma[:1], mine.encode([prompt]))
        torch.testing.assert_close(together[n : n + 1], alone, rtol=0, atol=1e-6)
    assert (together[0] - mine(x[:1], sigma[:1], mine.encode(["two left of a ring"]))[0]).abs().max() > 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_parts_are_no_children_and_get_no_gradient(family):
    mine = policy(family, trainable="full")
    assert {name.split(".")[0] for name in mine.state_dict()} == {"transformer"}
    call(mine).sum().backward()
    frozen = [p for part in mine.frozen._modules_by_name.values() for p in part.parameters()]
    assert frozen and all(p.grad is None and not p.requires_grad for p in frozen)
    assert not any(part.training for part in mine.frozen._modules_by_name.values())
    mine.train()
    assert not any(part.training for part in mine.frozen._modules_by_name.values())
    assert all(not t.requires_grad for t in mine.encode(["cross"]).tensors.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_trained(family):
    full = policy(family, trainable="full")
    assert all(p.requires_grad for p in full.parameters()) and full.lora is None
    adapted = policy(family)
    trained = [name for name, p in adapted.named_parameters() if p.requires_grad]
    assert trained and all("lora_" in name for name in trained)
    kind = POLICIES[family]
    default = policy(family, lora=None)
    assert default.lora == kind.default_lora
    ranks = {p.shape[0] for name, p in default.named_parameters() if "lora_A" in name}
    assert ranks == {kind.default_lora.rank}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_sees_the_continuous_timestep_the_same_at_rollout_and_recomputation(family):
    """1000 sigma is no integer here, and in bf16 it would be rounded by up to 2."""
    mine, seen = policy(family).to(torch.bfloat16), []
    mine.transformer.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["timestep"]), with_kwargs=True)
    update = Update(mine, [[0.1, 0.9]], num_steps=3, texts=PROMPTS)
    update(Native())
    scale = 1 if family == "flux" else 1000  # FLUX's transformer multiplies by 1000 itself
    expected = [[scale * s.item()] * 2 for s in update.sigmas[:-1].float()]
    rollout, again = seen[:3], seen[3:]
    assert [t.tolist() for t in rollout] == [pytest.approx(e, rel=1e-6) for e in expected]
    assert all(torch.equal(a, b) and a.dtype == torch.float32 for a, b in zip(rollout, again, strict=False))
    assert len(again) == 2
    assert any(t[0].item() * 1000 / scale % 1 > 0.1 for t in rollout)


@pytest.mark.parametrize("family", FAMILIES)
def test_activation_checkpointing_changes_memory_not_gradients(family):
    gradients = {}
    for flag in (False, True):
        mine = policy(family, activation_checkpointing=flag).eval()
        kept = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t.numel()) or t, lambda t: t):
            velocity = call(mine)
        velocity.square().sum().backward()
        gradients[flag] = ([p.grad for p in mine.parameters() if p.requires_grad], sum(kept))
    assert all(torch.equal(a, b) for a, b in zip(gradients[False][0], gradients[True][0], strict=True))
    assert gradients[True][1] < gradients[False][1]


def test_compile_is_passed_on(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, *a, **k: calls.append(type(self).__name__))
    policy("sd3")
    assert calls == []
    policy("sd3", compile=True)
    assert calls == ["SD3Transformer2DModel"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_is_the_same_policy(family):
    """Velocity, gradients and the reference with its adapters off; runs a C++ compiler."""
    plain, compiled = policy(family).eval(), policy(family, compile=True).eval()
    reference = compiled.reference()
    assert plain.state_dict().keys() == compiled.state_dict().keys()
    start = call(plain).detach()
    for mine in (plain, compiled):
        move(mine)
        call(mine).square().sum().backward()
    torch.testing.assert_close(call(compiled), call(plain), rtol=0, atol=1e-5)
    for ours, theirs in zip(compiled.parameters(), plain.parameters(), strict=True):
        if theirs.requires_grad:
            torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    x = torch.randn(1, *plain.latent_shape, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        reference(x, torch.full((1,), 0.5), compiled.encode(["cross"])), start, rtol=0, atol=1e-5
    )


def test_velocity_comes_back_in_the_latents_dtype_whatever_the_weights():
    exact = call(policy("sd3"))
    half = policy("sd3").to(torch.bfloat16)
    assert call(half).dtype == torch.float32 and call(half, dtype=torch.bfloat16).dtype == torch.bfloat16
    torch.testing.assert_close(call(half), exact, rtol=0, atol=0.05)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(policy("sd3")).dtype == torch.float32


def test_transitions_are_exact_whatever_the_policy_returns():
    """The log-probability of a bf16 policy's step is that of its rounded velocity, in fp32."""
    half = policy("sd3").to(torch.bfloat16).eval()
    x, sigmas = torch.randn(1, *half.latent_shape), torch.tensor([0.9, 0.6, 0.0], dtype=torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        velocity = half(x, torch.full((1,), 0.9), half.encode(["cross"])).detach()
        mean, std = FlowSDE(0.7).moments(x, velocity, sigmas, 0)
        log_prob = FlowSDE(0.7).log_prob(x, mean, std)
    assert mean.dtype == log_prob.dtype == torch.float32
    exact_mean, exact_std = FlowSDE(0.7).moments(x.double(), velocity.double(), sigmas, 0)
    exact = torch.distributions.Normal(exact_mean, exact_std).log_prob(x.double()).mean()
    assert log_prob.item() == pytest.approx(exact.item(), rel=1e-6)


@pytest.mark.parametrize(("family", "frames"), [("sd3", 1), ("flux", 1), ("wan21", 5)])
def test_decoding_in_chunks_and_slices_gives_the_same_images(family, frames):
    video = {"frames": frames} if family == "wan21" else {}
    latents = torch.randn(3, *policy(family, **video).latent_shape)
    images = {}
    for name, options in {"whole": {}, "chunks": {"decode_batch": 2}, "slices": {"vae_slicing": True}}.items():
        images[name] = policy(family, pipeline(family), **video, **options).decode(latents)
        assert images[name].dtype == torch.float32 and 0 <= images[name].min() < images[name].max() <= 1
    torch.testing.assert_close(images["chunks"], images["whole"], rtol=0, atol=1e-5)
    torch.testing.assert_close(images["slices"], images["whole"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["sd3", "wan21"])
def test_slicing_and_tiling_reach_the_vae(family):
    vae = policy(family, pipeline(family), vae_slicing=True, vae_tiling=True).frozen.vae
    assert vae.use_slicing and vae.use_tiling
    plain = policy(family).frozen.vae
    assert not plain.use_slicing and not plain.use_tiling


@pytest.mark.parametrize(("family", "frames"), [("sd3", 1), ("flux", 1), ("wan21", 5), ("wan22", 5)])
def test_a_picture_that_fits_one_tile_is_decoded_as_without_tiles(family, frames):
    options = {"frames": frames} if family.startswith("wan") else {}
    latents = torch.randn(2, *policy(family, **options).latent_shape)
    tiled = policy(family, pipeline(family), vae_tiling=True, **options)
    assert torch.equal(tiled.decode(latents), policy(family, **options).decode(latents))


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_tiles_are_decoded_apart_and_blended(family):
    """Tiles of 8 latents (16 pixels), one every 6 latents, blended over 4 pixels: the first 12 are the first tile's alone,
    and so are pixels 16 to 24 of the second."""
    tiled = policy(family, pipeline(family), height=32, width=32, vae_tiling=True, decode_batch=1)
    alone = policy(family, height=16, width=16)
    latents = torch.randn(2, *tiled.latent_shape)
    image = tiled.decode(latents)
    assert image.shape == (2, 3, 32, 32)
    first, second = alone.decode(latents[..., :8, :8]), alone.decode(latents[..., :8, 6:14])
    torch.testing.assert_close(image[..., :12, :12], first[..., :12, :12], rtol=0, atol=1e-5)
    torch.testing.assert_close(image[..., :12, 16:24], second[..., :12, 4:12], rtol=0, atol=1e-5)
    assert (image - policy(family, height=32, width=32).decode(latents)).abs().max() > 1e-3  # approximate, as said


@pytest.mark.parametrize("family", ["wan21", "wan22"])
def test_tiles_of_a_video_keep_its_shape(family):
    pipe = pipeline(family)
    tiled = policy(family, pipe, height=96, width=64, frames=5, vae_tiling=True)
    pipe.vae.enable_tiling(64, 64, 48, 48)  # smaller than the default of 256 pixels
    video = tiled.decode(torch.randn(1, *tiled.latent_shape))
    assert video.shape == (1, 3, 5, 96, 64) and 0 <= video.min() < video.max() <= 1


def test_vae_and_encoders_ignore_autocast_and_the_default_dtype():
    mine = policy("sd3")
    latents, plain = torch.randn(1, *mine.latent_shape), mine.encode(["cross"]).tensors
    image = mine.decode(latents)
    try:
        torch.set_default_dtype(torch.bfloat16)  # as Lightning's bf16-true does around each step
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(mine.decode(latents), image)
            assert all(torch.equal(t, plain[name]) for name, t in mine.encode(["cross"]).tensors.items())
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(torch.float32)


class Remembering(TextEncoder):
    """Notes where it is and where it is asked to compute; ``meta`` stands for an accelerator."""

    def __init__(self):
        self.name, self.places, self.asked = "remembering", [], []

    @property
    def modules(self):
        return {}

    def to(self, device):
        self.places.append(str(device))
        return self

    def __call__(self, prompts, max_sequence_length, device):
        self.asked.append((list(prompts), max_sequence_length, str(device)))
        return {"text": torch.zeros(len(prompts), max_sequence_length, 24), "pooled": torch.zeros(len(prompts), 16)}


@pytest.mark.parametrize(
    ("text_device", "places", "computed_on"),
    [("cpu", ["cpu"], "cpu"), ("offload", ["meta", "cpu"], "meta"), ("policy", ["meta"], "meta")],
)
def test_where_text_is_encoded(text_device, places, computed_on, monkeypatch):
    text = Remembering()
    mine = POLICIES["sd3"](
        transformer=sd3_transformer(), text=text, vae=None, height=32, width=32, text_device=text_device
    )  # fmt: skip
    monkeypatch.setattr(type(mine), "device", torch.device("meta"))
    monkeypatch.setattr("lightning_modules.policies.diffusers_base.own_precision", lambda device: torch.no_grad())
    assert mine.encode(["cross"]).tensors["text"].device.type == "meta"
    assert text.places == places
    assert text.asked == [(["cross"], 256, computed_on)]


def test_encoded_text_is_kept_on_disk(tmp_path):
    pipe = pipeline("sd3")
    first = policy("sd3", pipe, embedding_cache=str(tmp_path)).encode(PROMPTS)
    assert len(list(tmp_path.iterdir())) == len(PROMPTS)
    again = policy("sd3", embedding_cache=str(tmp_path))
    asked = []
    again._embed = lambda prompts: asked.append(prompts) or policy("sd3")._embed(prompts)
    assert again.encode([*PROMPTS, "two"]) and asked == [["two"]]
    (tmp_path / again._cache.path("two").name).unlink()
    for name, tensor in again.encode(PROMPTS).tensors.items():
        assert torch.equal(tensor, first.tensors[name])
    other_weights = pipeline("sd3", text_encoder=pipe.text_encoder_2)
    others = [
        policy("sd3", other_weights, embedding_cache=str(tmp_path)),
        policy("sd3", embedding_cache=str(tmp_path), max_sequence_length=TOKENS - 1),
    ]
    for stored, other in enumerate(others, start=2):
        other.encode(PROMPTS)
        assert len(list(tmp_path.iterdir())) == stored * len(PROMPTS)


def test_a_copy_has_its_own_transformer_and_shares_what_is_frozen():
    mine = policy("sd3")
    other = copy.deepcopy(mine)
    assert other.text is mine.text and other.frozen is mine.frozen
    mine_first, other_first = next(mine.parameters()), next(other.parameters())
    assert torch.equal(mine_first, other_first) and mine_first.data_ptr() != other_first.data_ptr()
    assert torch.equal(call(mine), call(other))


def test_encoding_under_inference_mode_serves_training():
    mine = policy("flux")
    with torch.inference_mode():
        conditioning = mine.encode(["cross"])
        images = mine.decode(torch.randn(1, *mine.latent_shape))
    mine(torch.randn(1, *mine.latent_shape), torch.ones(1), conditioning).sum().backward()
    assert images.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trainable": "most"}, "trainable='most': choose lora or full"),
        ({"trainable": "full", "lora": tiny_lora("sd3")}, "with trainable='full': set trainable: lora, or lora: null"),
        ({"decode_batch": 0}, "decode_batch=0: give at least 1"),
        ({"text_device": "gpu"}, "text_device='gpu': choose cpu, offload or policy"),
        ({"max_sequence_length": 0}, "max_sequence_length=0: give at least 1"),
        ({"max_sequence_length": 513}, "max_sequence_length=513: choose at most 512, the models' longest text"),
        ({"lora": tiny_lora("sd3", targets=("attn.to_q", "nowhere"))}, "nowhere"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        policy("sd3", **options)


def test_a_transformer_of_another_family_is_refused():
    pipe = pipeline("flux")
    with pytest.raises(
        ValueError, match="transformer is a FluxTransformer2DModel, SD3Policy needs a SD3Transformer2DModel"
    ):
        POLICIES["sd3"](transformer=pipe.transformer, text=None, vae=None, height=8, width=8)


def test_a_vae_of_another_class_is_refused():
    with pytest.raises(ValueError, match="vae is a AutoencoderKLWan, SD3Policy needs a AutoencoderKL"):
        POLICIES["sd3"](transformer=sd3_transformer(), text=None, vae=video_vae(), height=32, width=32)


def image_vae_of(**changes):
    """Nothing but a class and a configuration, which is all that is looked at."""
    config = dict(image_vae().config) | changes
    with torch.device("meta"):
        return AutoencoderKL.from_config(config)


@pytest.mark.parametrize(
    ("transformer", "vae", "message"),
    [
        (
            sd3_transformer(in_channels=16, out_channels=16),
            image_vae(),
            "have 16 channels and the VAE's 4: give the VAE",
        ),
        (sd3_transformer(), image_vae_of(latent_channels=16), "have 4 channels and the VAE's 16"),
        (sd3_transformer(in_channels=8), None, "takes 8 channels and gives 4, so it wants more than noise and text"),
        (sd3_transformer(), image_vae_of(shift_factor=None), "no shift_factor in its config"),
        (flux_transformer(in_channels=64), image_vae(), "have 16 channels and the VAE's 4"),
        (flux_transformer(in_channels=96, out_channels=16), image_vae(), "takes 96 channels and gives 16"),
        (flux_transformer(), image_vae_of(shift_factor=None), "no shift_factor in its config"),
        (wan_transformer(in_channels=48, out_channels=48), video_vae(), "have 48 channels and the VAE's 4"),
        (wan_transformer(in_channels=48, out_channels=48), video_vae("wan22"), "have 48 channels and the VAE's 4"),
        (wan_transformer(in_channels=36, out_channels=16), None, "takes 36 channels and gives 16"),
    ],
)
def test_components_that_do_not_fit_each_other_are_refused(transformer, vae, message):
    kind = next(kind for kind in POLICIES.values() if isinstance(transformer, kind.transformer_class))
    with pytest.raises(ValueError, match=message):
        kind(transformer=transformer, text=None, vae=vae, height=32, width=32)


def test_full_training_refuses_a_transformer_with_adapters():
    adapted = policy("sd3").transformer
    with pytest.raises(ValueError, match="with adapters: fuse them"):
        POLICIES["sd3"](transformer=adapted, text=None, vae=None, height=32, width=32, trainable="full")


def test_flux_refuses_an_impossible_guidance():
    for guidance in (float("nan"), float("inf"), -1.0):
        with pytest.raises(ValueError, match=f"guidance={guidance}: give a finite number"):
            policy("flux", guidance=guidance)


def test_a_policy_without_encoders_or_vae_says_so():
    mine = POLICIES["sd3"](transformer=sd3_transformer(), text=None, vae=None, height=32, width=32)
    with pytest.raises(ValueError, match="no text encoders: give text"):
        mine.encode(["cross"])
    with pytest.raises(ValueError, match="no VAE to decode with: give vae"):
        mine.decode(torch.zeros(1, *mine.latent_shape))


@pytest.mark.parametrize("cached", [False, True])
def test_no_prompts_are_refused(cached, tmp_path):
    mine = policy("sd3", embedding_cache=str(tmp_path) if cached else None)
    with pytest.raises(ValueError, match="no prompts to encode: give at least one"):
        mine.encode([])
    assert mine.encode([""]).tensors["text"].shape[0] == 1

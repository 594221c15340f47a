"""The embedded policy: conditioning, dtypes, weights files."""

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from datamodules.shapes_world import enumerate_prompts
from lightning_modules.policies import shapes
from lightning_modules.policies.shapes import PACKAGED_WEIGHTS, ShapesPolicy, tokenize

PROMPTS = ("a photo of a ring", "a drawing of a red circle and a black square", "a sketch of two crosses")
TINY = {"num_layers": 1, "width": 32, "num_heads": 2}


def tiny(seed: int = 0, weights: str | None = None) -> ShapesPolicy:
    torch.manual_seed(seed)
    return ShapesPolicy(weights, **TINY).eval()


@pytest.fixture
def weights(tmp_path) -> Path:
    path = tmp_path / "weights.safetensors"
    tiny().save_weights(path, made_by={"seed": 0})
    return path


def rewrite(path: Path, *, metadata: dict | None = None, tensors: dict | None = None) -> None:
    """Write the file again with some header entries or tensors replaced (None drops a tensor)."""
    with safe_open(path, framework="pt") as file:
        header = file.metadata() | (metadata or {})
    merged = load_file(path) | (tensors or {})
    save_file({name: t for name, t in merged.items() if t is not None}, path, metadata=header)


def test_every_prompt_of_the_world_can_be_read():
    tokens = tokenize([row["prompt"] for row in enumerate_prompts()])
    assert len(tokens.unique(dim=0)) == len(tokens)
    assert set(tokens.unique().tolist()) == set(range(1 + len(shapes.VOCABULARY)))


def test_tokens_are_positions_in_the_vocabulary():
    a, photo, of, ring = (1 + shapes.VOCABULARY.index(word) for word in ("a", "photo", "of", "ring"))
    assert tokenize(["A photo of  a ring."]).tolist() == [[a, photo, of, a, ring] + [0] * 7]


@pytest.mark.parametrize(("prompt", "message"), [
    ("a photo of a dog", "unknown word 'dog'.*circle"), ("", "0 words"), ("a " * 13, "13 words"),
])  # fmt: skip
def test_unreadable_prompts_are_refused(prompt, message):
    with pytest.raises(ValueError, match=message):
        tokenize(["a photo of a ring", prompt])


def test_conditioning_is_detached_and_a_row_does_not_depend_on_the_others():
    policy = tiny()
    together = policy.encode(PROMPTS)
    assert len(together) == 3 and not any(t.requires_grad for t in together.tensors.values())
    for row, prompt in enumerate(PROMPTS):
        for name, alone in policy.encode([prompt]).tensors.items():
            torch.testing.assert_close(together.tensors[name][row : row + 1], alone)


def test_word_order_reaches_the_velocity():
    policy = tiny().double()
    x, sigma = torch.randn(1, 3, 32, 32, dtype=torch.float64), torch.tensor([0.7], dtype=torch.float64)
    left, right = (
        policy(x, sigma, policy.encode([f"a photo of a {a} left of a {b}"]))
        for a, b in (("ring", "cross"), ("cross", "ring"))
    )
    assert (left - right).abs().max() > 1e-6


def test_velocity_in_a_batch_is_the_velocity_alone():
    policy = tiny().double()
    x, sigma = torch.randn(3, *policy.latent_shape, dtype=torch.float64), torch.tensor([1.0, 0.5, 0.1]).double()
    conditioning = policy.encode(PROMPTS)
    together = policy(x, sigma, conditioning)
    for row in range(3):
        alone = policy(x[row : row + 1], sigma[row : row + 1], conditioning.rows(torch.tensor([row])))
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-12, atol=1e-12)


def test_float64_runs_throughout():
    """Central differences of a velocity component agree with autograd to float64's accuracy, not float32's."""
    policy = tiny().double()
    conditioning = policy.encode(PROMPTS[:1])
    x, direction, weight = torch.randn(3, 1, 3, 32, 32, dtype=torch.float64)

    def component(latents: torch.Tensor) -> torch.Tensor:
        velocity = policy(latents, torch.tensor([0.6], dtype=torch.float64), conditioning)
        assert velocity.dtype == torch.float64
        return (velocity * weight).sum()

    (gradient,) = torch.autograd.grad(component(x.requires_grad_()), x)
    h = 1e-4
    with torch.no_grad():
        slope = (component(x + h * direction) - component(x - h * direction)) / (2 * h)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("latent_dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16])
def test_the_velocity_has_the_latents_dtype(latent_dtype, model_dtype):
    policy = tiny().to(model_dtype)
    x = torch.randn(2, 3, 32, 32).to(latent_dtype)
    assert policy(x, torch.tensor([1.0, 0.2]), policy.encode(PROMPTS[:2])).dtype == latent_dtype


def test_timesteps_are_a_thousand_sigma():
    policy = tiny()
    seen = []
    policy.transformer.time_text_embed.time_proj.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0]))
    policy(torch.randn(2, 3, 32, 32), torch.tensor([1.0, 0.25]), policy.encode(PROMPTS[:2]))
    assert seen[0].tolist() == [1000.0, 250.0]


def test_decode_maps_latents_to_the_unit_interval():
    latents = torch.tensor([-3.0, -1.0, 0.0, 0.5, 1.0, 7.0], dtype=torch.float64)
    images = tiny().decode(latents)
    assert images.dtype == torch.float32 and images.tolist() == [0, 0, 0.5, 0.75, 1, 1]


def test_the_text_part_is_neither_child_nor_trained():
    policy = tiny()
    assert all(name.startswith("transformer.") for name in policy.state_dict())
    assert not any(parameter.requires_grad for parameter in policy.frozen.text.parameters())
    assert policy.embed(PROMPTS).tensors["text"].requires_grad is False


def test_embed_gives_gradients_once_the_text_part_is_trained():
    policy = tiny()
    policy.frozen.text.requires_grad_(True)
    assert policy.embed(PROMPTS).tensors["pooled"].requires_grad
    assert not policy.encode(PROMPTS).tensors["pooled"].requires_grad


def test_reference_keeps_the_velocity_of_now():
    policy = tiny()
    x, sigma, conditioning = torch.randn(1, 3, 32, 32), torch.tensor([0.5]), policy.encode(PROMPTS[:1])
    reference, before = policy.reference(), policy(x, sigma, conditioning)
    torch.nn.init.ones_(policy.transformer.proj_out.bias)
    assert torch.equal(reference(x, sigma, conditioning), before)
    assert not torch.equal(policy(x, sigma, conditioning), before)


def test_weights_come_back_rounded_to_bf16(weights):
    saved, loaded = tiny(), tiny(seed=1, weights=str(weights))
    for name, tensor in loaded._weights().items():
        original = saved._weights()[name]
        expected = original.bfloat16().float() if isinstance(original, torch.nn.Parameter) else original
        assert tensor.dtype == torch.float32 and torch.equal(tensor, expected), name


def test_loading_does_not_touch_what_is_trained_and_what_is_not(weights):
    policy = tiny(weights=str(weights))
    assert all(p.requires_grad for p in policy.parameters())
    assert not any(p.requires_grad for p in policy.frozen.text.parameters())


def test_the_header_says_what_made_the_weights(weights):
    with safe_open(weights, framework="pt") as file:
        header = file.metadata()
    assert json.loads(header["made_by"]) == {"seed": 0}
    assert json.loads(header["architecture"]) == {**TINY, "patch_size": 8}
    assert header["vocabulary"].split() == list(shapes.VOCABULARY)


def test_another_architecture_is_refused(weights):
    with pytest.raises(ValueError, match='have architecture.*"width": 32.*asked for.*64'):
        ShapesPolicy(str(weights), **(TINY | {"width": 64}))


def test_missing_weights_are_named(tmp_path):
    with pytest.raises(ValueError, match="no weights at .*nowhere"):
        ShapesPolicy(str(tmp_path / "nowhere"))


def test_truncated_and_foreign_files_are_refused(weights, tmp_path):
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="no readable safetensors file"):
        tiny(weights=str(weights))
    save_file({"x": torch.zeros(1)}, tmp_path / "foreign")
    with pytest.raises(ValueError, match="format None"):
        tiny(weights=str(tmp_path / "foreign"))


def test_a_flipped_number_fails_the_checksum(weights):
    rewrite(weights, tensors={"transformer.proj_out.bias": torch.zeros(48, dtype=torch.bfloat16)})
    with pytest.raises(ValueError, match="checksum"):
        tiny(weights=str(weights))


def test_a_missing_tensor_and_another_vocabulary_are_named(weights):
    untouched = copy.copy(weights.read_bytes())
    rewrite(weights, tensors={"text.positions": None})
    with pytest.raises(ValueError, match="differ in .*text.positions"):
        tiny(weights=str(weights))
    weights.write_bytes(untouched)
    rewrite(weights, metadata={"vocabulary": "a an"})
    with pytest.raises(ValueError, match="another vocabulary: a an"):
        tiny(weights=str(weights))


@pytest.mark.parametrize("bad", [{"width": 30, "num_heads": 4}, {"patch_size": 5}])
def test_impossible_architectures_are_refused(bad):
    with pytest.raises(ValueError, match="multiple|divide"):
        ShapesPolicy(None, **bad)


def test_packaged_weights_are_small_and_draw_on_a_light_grey_ground():
    """Ten Euler steps on a grid of shift 3: most pixels have the world's ground colour."""
    assert Path(PACKAGED_WEIGHTS).stat().st_size <= 6e6
    policy = ShapesPolicy().eval()
    u = torch.linspace(1, 0, 11)
    sigmas = 3 * u / (1 + 2 * u)
    x = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    conditioning = policy.encode(["a photo of a red square"] * 4)
    with torch.no_grad():
        for sigma, following in zip(sigmas[:-1], sigmas[1:], strict=True):
            x = x + (following - sigma) * policy(x, sigma.expand(4), conditioning)
    ground = (policy.decode(x) - 0.85).abs().amax(1) < 0.05
    assert ((ground.float().mean((1, 2)) > 0.6) & (ground.float().mean((1, 2)) < 0.97)).all()

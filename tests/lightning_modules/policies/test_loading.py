"""``from_pretrained``: what a folder holds is what is trained, and what is wrong with it is said before weights are read."""

import json
import shutil

import pytest
import torch
from jsonargparse import ArgumentParser

from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.policies.base import Policy
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.policies.lora import LoRA
from tests.tiny_models import FAMILIES, POLICIES, TOKENS, flux_transformer, pipeline, policy, size, tiny_lora


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("pretrained")
    for family in FAMILIES:
        pipeline(family).save_pretrained(root / family)
    return root


@pytest.fixture
def folder(folders, tmp_path):
    """A copy of the SD3 folder that a test may damage."""
    return shutil.copytree(folders / "sd3", tmp_path / "sd3")


@pytest.fixture
def no_weights(monkeypatch):
    """Reading weights fails the test."""

    def refuse(*arguments, **options):
        pytest.fail("weights were read")

    for kind in POLICIES.values():
        for part in (kind.transformer_class, kind.vae_class, kind.pipeline_class):
            monkeypatch.setattr(part, "from_pretrained", refuse)


def load(family, path, **options):
    defaults = size(family) | {"max_sequence_length": TOKENS, "dtype": "float32", "lora": tiny_lora(family)}
    return POLICIES[family].from_pretrained(str(path), **(defaults | options))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_gives_the_policy_of_its_components(family, folders):
    torch.manual_seed(0)
    loaded, made = load(family, folders / family, trainable="full", lora=None), policy(family, trainable="full")
    x, sigma = torch.randn(2, *made.latent_shape), torch.tensor([0.9, 0.2])
    prompts = ["a red circle", "cross"]
    torch.testing.assert_close(loaded(x, sigma, loaded.encode(prompts)), made(x, sigma, made.encode(prompts)))
    torch.testing.assert_close(loaded.decode(x), made.decode(x))


def test_dtypes(folders):
    half = load("wan21", folders / "wan21", dtype="bfloat16")
    kinds = {name: p.dtype for name, p in half.transformer.named_parameters()}
    assert kinds["patch_embedding.weight"] == torch.bfloat16
    assert kinds["scale_shift_table"] == half.transformer.rope.freqs_cos.dtype == torch.float32
    assert {d for name, d in kinds.items() if "lora_" in name} == {torch.float32}
    assert half.text.dtype == torch.bfloat16
    assert next(half.frozen.vae.parameters()).dtype == torch.float32
    out = half(torch.randn(1, *half.latent_shape), torch.ones(1), half.encode(["cross"]))
    assert out.dtype == torch.float32 and out.isfinite().all()


def test_variant_of_the_files(folder):
    pipeline("sd3").save_pretrained(folder.with_name("both"), variant="fp16")
    loaded = load("sd3", folder.with_name("both"), variant="fp16")
    assert torch.equal(loaded.transformer.proj_out.weight, pipeline("sd3").transformer.proj_out.weight)
    with pytest.raises(ValueError, match="no text encoders in .*nowhere.*give a local folder or a hub id, its variant"):
        load("sd3", folder, variant="nowhere")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float8"}, "dtype='float8': choose one of float32, bfloat16, float16"),
        ({"height": 10}, "height=10 is no multiple of 4"),
        ({"frames": 3}, "frames=3: SD3Policy makes images"),
        ({"trainable": "none"}, "trainable='none': choose lora or full"),
        ({"lora": LoRA(rank=2, alpha=2, targets=["attn.to_q", "nowhere"])}, "nowhere"),
    ],
)
def test_wrong_options_are_found_before_weights_are_read(options, message, folders, no_weights):
    with pytest.raises(ValueError, match=message):
        load("sd3", folders / "sd3", **options)


def test_frames_of_wan_are_checked_before_weights_are_read(folders, no_weights):
    with pytest.raises(ValueError, match="frames=8 is not 4 k"):
        load("wan21", folders / "wan21", frames=8)


def test_guidance_of_flux_is_checked_before_weights_are_read(folders, no_weights):
    with pytest.raises(ValueError, match="guidance=None, but this transformer embeds"):
        load("flux", folders / "flux", guidance=None)


@pytest.mark.parametrize("part", ["transformer", "vae", "text_encoder_3", "tokenizer_2"])
def test_a_missing_component_is_found_before_weights_are_read(part, folder, no_weights):
    shutil.rmtree(folder / part)
    with pytest.raises(ValueError, match=f"has no folder {part}: give a complete StableDiffusion3Pipeline repository"):
        load("sd3", folder)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_a_component_that_the_index_leaves_out(folder, no_weights):
    edit(folder / "model_index.json", text_encoder_3=[None, None])
    with pytest.raises(ValueError, match="has no text_encoder_3 in its model_index.json"):
        load("sd3", folder)


def test_another_transformer_in_the_index(folder, no_weights):
    edit(folder / "model_index.json", transformer=["diffusers", "FluxTransformer2DModel"])
    with pytest.raises(
        ValueError, match="the transformer of .* is a FluxTransformer2DModel, SD3Policy needs a SD3Trans"
    ):
        load("sd3", folder)


def test_another_transformer_in_its_folder(folder, folders, no_weights):
    shutil.rmtree(folder / "transformer")
    shutil.copytree(folders / "flux" / "transformer", folder / "transformer")
    with pytest.raises(ValueError, match="transformer/config.json is of a FluxTransformer2DModel, expected a SD3Trans"):
        load("sd3", folder)


def test_another_pipeline(folders, no_weights):
    with pytest.raises(ValueError, match="holds a FluxPipeline, SD3Policy needs a StableDiffusion3Pipeline"):
        load("sd3", folders / "flux")


def test_two_experts(folders, tmp_path, no_weights):
    two = shutil.copytree(folders / "wan21", tmp_path / "wan")
    edit(two / "model_index.json", transformer_2=["diffusers", "WanTransformer3DModel"])
    with pytest.raises(ValueError, match="has two experts .* not supported: use"):
        load("wan21", two)


@pytest.mark.parametrize("name", ["nowhere/at-all", "no_such_folder"])
def test_a_place_that_holds_nothing(name, no_weights):
    with pytest.raises(ValueError, match=f"no model_index.json in {name} .*give a local folder or a hub id"):
        load("sd3", name)


def parsed(values):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(Policy, "policy")
    config = parser.parse_object({"policy": values})
    return parser.instantiate(parser.parse_string(parser.dump(config, skip_unset=False))).policy


def test_from_yaml_with_options_of_the_class(folders):
    values = {
        "class_path": "lightning_modules.policies.guidance.ClassifierFreeGuidance",
        "init_args": {"scale": 4.5, "policy": {
            "class_path": "lightning_modules.policies.sd3.SD3Policy.from_pretrained",
            "init_args": {"path": str(folders / "sd3"), "height": 8, "width": 12, "dtype": "float32",
                          "lora": {"rank": 3, "alpha": 5, "targets": ["attn.to_q"]}, "decode_batch": 2},
        }},
    }  # fmt: skip
    guided = parsed(values)
    assert isinstance(guided, ClassifierFreeGuidance) and guided.scale == 4.5
    assert guided.policy.lora.rank == 3 and guided.policy.decode_batch == 2 and guided.latent_shape == (4, 4, 6)
    values["init_args"]["policy"]["init_args"]["hieght"] = 8
    with pytest.raises(Exception, match="hieght"):
        parsed(values)


@pytest.mark.parametrize("guidance", [0.0, 1.0, 3.5])
def test_embedded_guidance_keeps_its_value_from_yaml_to_the_transformer(guidance, folders):
    flux = parsed({
        "class_path": "lightning_modules.policies.flux.FluxPolicy.from_pretrained",
        "init_args": {"path": str(folders / "flux"), "height": 8, "width": 8, "guidance": guidance, "dtype": "float32",
                      "max_sequence_length": TOKENS, "trainable": "full"},
    })  # fmt: skip
    seen = []
    flux.transformer.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["guidance"]), with_kwargs=True)
    flux(torch.randn(2, *flux.latent_shape), torch.ones(2), flux.encode(["cross", "two"]))
    assert seen[0].tolist() == [guidance] * 2


def test_no_embedded_guidance_survives_yaml(folders, tmp_path):
    pipeline("flux", transformer=flux_transformer(guidance_embeds=False)).save_pretrained(tmp_path)
    flux = parsed({
        "class_path": "lightning_modules.policies.flux.FluxPolicy.from_pretrained",
        "init_args": {"path": str(tmp_path), "height": 8, "width": 8, "guidance": None, "dtype": "float32"},
    })  # fmt: skip
    assert flux.guidance is None


def test_the_shell_takes_it():
    """The class path is accepted where the training module wants a policy."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(
        LeanGRPO, "model", skip={"schedule", "transition", "sigmas", "window", "advantage", "optimizer"}
    )
    config = parser.parse_object({"model": {"policy": {
        "class_path": "lightning_modules.policies.wan.WanPolicy.from_pretrained",
        "init_args": {"path": "p", "height": 16, "width": 16, "frames": 5},
    }}})  # fmt: skip
    assert config.model.policy.init_args.frames == 5

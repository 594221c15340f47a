"""``from_pretrained``: what a folder holds is what is trained, and what is wrong with it is said before weights are read."""

import json
import shutil

import pytest
import torch
import transformers
from jsonargparse import ArgumentParser
from safetensors.torch import load_file, save_file

from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.policies.base import Policy
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.policies.lora import LoRA
from tests.tiny_models import (
    CLIP_TOKENS,
    FAMILIES,
    POLICIES,
    TOKENS,
    flux_transformer,
    pipeline,
    policy,
    size,
    tiny_lora,
)


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
        encoders = [
            getattr(transformers, kind.text_class.components[name]) for name in kind.text_class.pairs().values()
        ]
        for part in (kind.transformer_class, kind.vae_class, kind.pipeline_class, *encoders):
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
    with pytest.raises(
        ValueError, match="no weights of text_encoder in .*nowhere.*give a local folder or a hub id, its variant"
    ):
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


@pytest.mark.parametrize("nonsense", ["T5EncoderModel", ["transformers"], ["transformers", 5], {}])
def test_an_index_that_says_nothing_of_a_component(nonsense, folder, no_weights):
    edit(folder / "model_index.json", text_encoder_3=nonsense)
    with pytest.raises(ValueError, match="has no text_encoder_3 in its model_index.json"):
        load("sd3", folder)


@pytest.mark.parametrize(
    ("part", "other", "wanted"),
    [
        ("text_encoder", "CLIPTextModel", "CLIPTextModelWithProjection"),
        ("text_encoder_3", "UMT5EncoderModel", "T5EncoderModel"),
        ("tokenizer_2", "T5Tokenizer", "CLIPTokenizer"),
        ("tokenizer_3", "CLIPTokenizerFast", "T5Tokenizer"),
        ("vae", "AutoencoderKLWan", "AutoencoderKL"),
    ],
)
def test_another_class_in_the_index(part, other, wanted, folder, no_weights):
    edit(folder / "model_index.json", **{part: ["transformers", other]})
    with pytest.raises(
        ValueError, match=f"the {part} of .* is a {other}, SD3Policy needs a {wanted}: give a repository"
    ):
        load("sd3", folder)


def test_the_older_names_of_the_tokenizers_are_known(folder):
    """Released repositories name the classes of transformers 4."""
    edit(
        folder / "model_index.json",
        tokenizer_2=["transformers", "CLIPTokenizerFast"],
        tokenizer_3=["transformers", "T5TokenizerFast"],
    )
    ours, plain = load("sd3", folder).encode(["a red circle"]), policy("sd3").encode(["a red circle"])
    torch.testing.assert_close(ours.tensors, plain.tensors)


@pytest.mark.parametrize(("part", "other"), [("text_encoder_3", "text_encoder"), ("text_encoder", "text_encoder_3")])
def test_another_text_encoder_in_its_folder(part, other, folder, no_weights):
    shutil.copy(folder / other / "config.json", folder / part / "config.json")
    kinds = {"text_encoder": "clip_text_model", "text_encoder_3": "t5"}
    with pytest.raises(ValueError, match=f"{part}/config.json is of a {kinds[other]} model, expected {kinds[part]}"):
        load("sd3", folder)


def test_a_text_encoder_that_was_cut_out_of_a_larger_model(folder):
    """CLIP repositories describe both towers in one file."""
    config = json.loads((folder / "text_encoder/config.json").read_text())
    both = {"model_type": "clip", "text_config": config, "projection_dim": config["projection_dim"]}
    (folder / "text_encoder/config.json").write_text(json.dumps(both))
    ours, plain = load("sd3", folder).encode(["cross"]), policy("sd3").encode(["cross"])
    torch.testing.assert_close(ours.tensors, plain.tensors)


def test_latents_of_another_vae_are_found_before_weights_are_read(folder, no_weights):
    edit(folder / "vae/config.json", latent_channels=16)
    with pytest.raises(ValueError, match="latents have 4 channels and the VAE's 16"):
        load("sd3", folder)


TOKENIZERS = [(family, name) for family in FAMILIES for name in POLICIES[family].text_class.pairs()]
"""Every tokenizer of every family."""


def no_files(folder):
    for file in folder.iterdir():
        file.unlink()


def no_vocabulary(folder):
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("spoil", [no_files, no_vocabulary])
@pytest.mark.parametrize(("family", "name"), TOKENIZERS)
def test_a_tokenizer_without_its_vocabulary_is_found_before_weights_are_read(
    family, name, spoil, folders, tmp_path, no_weights
):
    folder = shutil.copytree(folders / family, tmp_path / "base")
    spoil(folder / name)
    with pytest.raises(ValueError, match=rf"base/{name} knows \d+ tokens .*lacks its files.*give the complete folder"):
        load(family, folder)


def test_a_tokenizer_that_cannot_be_read(folder, no_weights):
    (folder / "tokenizer_3/tokenizer.json").write_bytes(b"\0 no json")
    with pytest.raises(ValueError, match="no files of tokenizer_3 in .* that can be read .*fetch damaged files again"):
        load("sd3", folder)


@pytest.mark.parametrize("family", ["sd3", "flux"])
def test_a_tokenizer_without_its_length_is_found_before_weights_are_read(family, folders, tmp_path, no_weights):
    folder = shutil.copytree(folders / family, tmp_path / "base")
    (folder / "tokenizer/tokenizer_config.json").unlink()
    with pytest.raises(
        ValueError, match=f"base/tokenizer makes up to .* takes {CLIP_TOKENS}: its tokenizer_config.json is missing"
    ):
        load(family, folder)


WEIGHTS = [
    (family, name)
    for family in ("sd3", "wan21")
    for name in ("transformer", "vae", *POLICIES[family].text_class.pairs().values())
]
"""Every kind of network: CLIP, T5, umT5, both VAEs, two transformers."""


def as_pickle(file):
    """The same weights in the older format."""
    name = "pytorch_model.bin" if file.name == "model.safetensors" else file.with_suffix(".bin").name
    torch.save(load_file(file), file.with_name(name))
    file.unlink()
    return file.with_name(name)


def truncated(content):
    return content[: len(content) // 2]


def garbage(content):
    return b"garbage" * 1000


def pointer(content):
    """What a clone without git-lfs leaves."""
    return b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"


@pytest.mark.parametrize("spoil", [truncated, garbage, pointer, bytes])
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
@pytest.mark.parametrize(("family", "name"), WEIGHTS)
def test_damaged_weights_are_named(family, name, kind, spoil, folders, tmp_path):
    folder = shutil.copytree(folders / family, tmp_path / "base")
    (file,) = (folder / name).glob("*.safetensors")
    file = as_pickle(file) if kind == "bin" else file
    file.write_bytes(b"" if spoil is bytes else spoil(file.read_bytes()))
    with pytest.raises(
        ValueError, match=f"no weights of {name} in .*base that can be read .*fetch damaged files again"
    ):
        load(family, folder)


@pytest.mark.parametrize(("family", "name"), WEIGHTS)
def test_weights_that_lack_a_tensor_are_not_made_up(family, name, folders, tmp_path):
    folder = shutil.copytree(folders / family, tmp_path / "base")
    (file,) = (folder / name).glob("*.safetensors")
    tensors = load_file(file)
    del tensors[min(tensors)]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=f"the weights of {name} in .*base lack 1 tensors, first .*fetch that folder again"
    ):
        load(family, folder)


@pytest.mark.parametrize("name", ["transformer", "text_encoder_3"])
def test_weights_of_another_shape(name, folder):
    (file,) = (folder / name).glob("*.safetensors")
    tensors = load_file(file)
    tensors[min(tensors)] = torch.zeros(7, 5)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=f"no weights of {name} in .* that can be read"):
        load("sd3", folder)


def test_a_missing_shard(folder):
    sharded = pipeline("sd3").transformer
    shutil.rmtree(folder / "transformer")
    sharded.save_pretrained(folder / "transformer", max_shard_size="40KB")
    assert load("sd3", folder).latent_shape == (4, 4, 6)
    next((folder / "transformer").glob("*-00002-of-*")).unlink()
    with pytest.raises(ValueError, match="no weights of transformer in .* that can be read .*00002-of-"):
        load("sd3", folder)


def test_weights_in_the_older_format(folder):
    for name in ("transformer", "vae", "text_encoder", "text_encoder_3"):
        as_pickle(next((folder / name).glob("*.safetensors")))
    ours, plain = load("sd3", folder), policy("sd3")
    torch.testing.assert_close(ours.encode(["cross"]).tensors, plain.encode(["cross"]).tensors)
    x = torch.randn(1, *plain.latent_shape)
    torch.testing.assert_close(ours.decode(x), plain.decode(x))


def test_a_config_of_nonsense(folder, no_weights):
    edit(folder / "transformer/config.json", num_layers="two")
    with pytest.raises(ValueError, match="no transformer/config.json in .* that can be read .TypeError"):
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

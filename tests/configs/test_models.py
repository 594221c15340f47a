"""The released architectures, on the ``meta`` device: their sizes, and those of the canonical adapters."""

import functools
import inspect

import diffusers
import pytest
import torch
import yaml

from benchmarks.random_weights import FAMILIES, VAES, component, described, untrained
from lightning_modules.plan.plan import optimizer_bytes
from lightning_modules.policies.lora import inject

PARAMETERS = {
    "flux_dev": 11_901_408_320,
    "sd35_medium": 2_243_171_520,
    "sd35_large": 8_056_627_520,
    "wan21_1_3b": 1_418_996_800,
    "wan21_14b": 14_288_491_584,
    "wan22_ti2v_5b": 4_999_787_712,
}
ADAPTERS = {  # elements, tensors
    "flux_dev": (179_306_496, 684),  # the paper's own figure
    "sd35_medium": (18_776_064, 382),
    "wan21_1_3b": (23_592_960, 480),
}


def test_every_file_is_counted_here(repository):
    assert {path.stem for path in (repository / "configs/model").glob("*.yaml")} == PARAMETERS.keys()


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_and_adapters_of_the_released_models(name, repository):
    transformer = component(described("model", name), "bfloat16", "meta")
    assert sum(p.numel() for p in transformer.parameters()) == PARAMETERS[name]
    header = (repository / f"configs/model/{name}.yaml").read_text().splitlines()[0]
    assert f"{PARAMETERS[name]:,} parameters" in header
    if name in ADAPTERS:
        inject(transformer, FAMILIES[type(transformer).__name__].default_lora)
        trained = [p for p in transformer.parameters() if p.requires_grad]
        assert (sum(p.numel() for p in trained), len(trained)) == ADAPTERS[name]
        checkpoint = sum(p.nbytes for p in trained) + optimizer_bytes(
            functools.partial(torch.optim.AdamW, lr=1), trained
        )
        assert checkpoint <= 2.2e9  # what a checkpoint holds beside counters


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_argument_of_the_architecture_is_named(name):
    given = described("model", name)
    kind = getattr(diffusers, given["class_path"].removeprefix("diffusers."))
    assert given["init_args"].keys() == inspect.signature(kind.__init__).parameters.keys() - {"self"}


def test_flux_and_wan_14b_are_the_classes_defaults():
    defaults = {
        name: {k: p.default for k, p in inspect.signature(kind.__init__).parameters.items() if k != "self"}
        for name, kind in (
            ("flux_dev", diffusers.FluxTransformer2DModel),
            ("wan21_14b", diffusers.WanTransformer3DModel),
        )
    }
    for name, expected in defaults.items():
        given = {k: tuple(v) if isinstance(v, list) else v for k, v in described("model", name)["init_args"].items()}
        changed = {k for k, v in given.items() if v != expected[k]}
        assert changed == ({"guidance_embeds"} if name == "flux_dev" else set())


@pytest.mark.parametrize("lora", ["sd3_r32", "flux_r64", "wan_r32"])
def test_the_adapters_on_file_are_the_families_own(lora, repository):
    given = yaml.safe_load((repository / f"configs/lora/{lora}.yaml").read_text())
    family = {"sd3": "SD3Transformer2DModel", "flux": "FluxTransformer2DModel", "wan": "WanTransformer3DModel"}
    default = FAMILIES[family[lora.partition("_")[0]]].default_lora
    assert (given["rank"], given["alpha"], set(given["targets"])) == (default.rank, default.alpha, set(default.targets))
    assert (given["init"], given["dtype"]) == (default.init, default.dtype)


def test_random_weights_make_a_policy_that_runs():
    smaller = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 12, "ffn_dim": 8, "text_dim": 6}
    vae = {"base_dim": 4, "num_res_blocks": 1}
    policy = untrained(
        "wan21_1_3b", smaller=smaller, smaller_vae=vae, options={"height": 16, "width": 32, "max_sequence_length": 5}
    )
    conditioning = policy.encode(["a", "b"])
    assert conditioning.tensors["text"].shape == (2, 5, 6)
    velocity = policy(torch.randn(2, *policy.latent_shape), torch.tensor([0.5, 0.7]), conditioning)
    assert velocity.shape == (2, 16, 1, 2, 4) and bool(velocity.isfinite().all())
    assert policy.frozen.vae.config.base_dim == 4


@pytest.mark.parametrize(("name", "shape"), [("wan21_14b", (16, 3, 88, 160)), ("wan22_ti2v_5b", (48, 3, 44, 80))])
def test_a_models_vae_decides_its_latents(name, shape):
    options = {"height": 704, "width": 1280, "frames": 9, "trainable": "full"}
    policy = untrained(name, device="meta", smaller={"num_layers": 1}, options=options)
    assert policy.latent_shape == shape
    config = policy.frozen.vae.config
    assert len(config.latents_mean) == len(config.latents_std) == config.z_dim == shape[0]


def test_every_model_has_a_vae_on_file(repository):
    assert VAES.keys() == PARAMETERS.keys()
    assert set(VAES.values()) == {path.stem for path in (repository / "configs/vae").glob("*.yaml")}


def test_an_unknown_architecture_is_named():
    with pytest.raises(ValueError, match=r"no model 'flux_pro' is on file: choose one of flux_dev, sd35_large"):
        untrained("flux_pro")

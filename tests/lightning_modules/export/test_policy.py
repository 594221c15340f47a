import copy
import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lightning_modules.export import adapters
from lightning_modules.export import policy as export
from lightning_modules.export.policy import export_policy, how_to_open
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.policies.lora import adapter_layers
from lightning_modules.policies.shapes import ShapesPolicy
from tests.tiny import TinyPolicy
from tests.tiny_models import FAMILIES, TRANSFORMERS, move, pipeline, policy, tiny_lora

FILE = "pytorch_lora_weights.safetensors"


def trained(family, **options):
    """A policy that has moved away from its start: no adapter adds zero."""
    mine = policy(family, **options).eval()
    move(mine)
    return mine


def question(mine):
    x = torch.randn(2, *mine.latent_shape, generator=torch.Generator().manual_seed(3))
    return x, torch.tensor([0.9, 0.3]), mine.encode(["a red circle", "cross"])


def with_transformer(mine, transformer):
    """The same policy on another transformer."""
    other = copy.copy(mine)
    other._modules = {"transformer": transformer.eval()}
    return other


def state_of(mine):
    return (
        [(name, p.data_ptr(), p._version, p.requires_grad, p.dtype) for name, p in mine.named_parameters()],
        [(layer.disable_adapters, layer.active_adapters, list(layer.r)) for layer in adapter_layers(mine)],
        list(getattr(mine.transformer, "peft_config", ())),
        mine.training,
    )


@pytest.mark.parametrize("alpha", [2, 6, 3.5], ids=["alpha=r", "alpha=3r", "alpha=1.75r"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fresh_pipeline_with_the_exported_adapters_has_the_trained_velocity(family, alpha, tmp_path):
    mine = trained(family, lora=tiny_lora(family, alpha=alpha))
    asked = question(mine)
    folder = export_policy(mine, tmp_path / "export")
    fresh = pipeline(family)
    base = with_transformer(mine, fresh.transformer)(*asked)
    fresh.load_lora_weights(str(folder), local_files_only=True)
    velocity = mine(*asked)
    assert torch.equal(with_transformer(mine, fresh.transformer)(*asked), velocity)
    assert (velocity - base).norm() > 1e-3 * base.norm()
    assert how_to_open(mine, folder) == f"pipe.load_lora_weights({json.dumps(str(folder))})"


@pytest.mark.parametrize("family", FAMILIES)
def test_images_of_the_pipeline_change_with_the_adapters(family, tmp_path):
    """The user's own way: the whole pipeline, called."""
    mine = trained(family)
    folder = export_policy(mine, tmp_path / "export")
    options = {"height": mine.height, "width": mine.width, "num_inference_steps": 2, "output_type": "latent"}
    options |= {"num_frames": 1} if family.startswith("wan") else {}

    def latents(pipe):
        return pipe("a red circle", generator=torch.Generator().manual_seed(0), max_sequence_length=12, **options)[0]

    loaded = pipeline(family)
    loaded.load_lora_weights(str(folder), local_files_only=True)
    in_place = pipeline(family, transformer=mine.transformer)
    assert torch.equal(latents(loaded), latents(in_place))
    assert not torch.equal(latents(loaded), latents(pipeline(family)))


def test_the_file_names_every_layer_and_says_alpha(tmp_path):
    mine = trained("sd3")
    folder = export_policy(mine, tmp_path / "new" / "export")
    assert [path.name for path in folder.iterdir()] == [FILE]
    parameters = {name: p for name, p in mine.transformer.named_parameters() if p.requires_grad}
    with safe_open(folder / FILE, framework="pt") as file:
        header = json.loads(file.metadata()["lora_adapter_metadata"])
    tensors = load_file(folder / FILE)
    assert tensors.keys() == {f"transformer.{name.replace('.default', '')}" for name in parameters}
    assert all(torch.equal(tensors[f"transformer.{n.replace('.default', '')}"], p) for n, p in parameters.items())
    assert header == {
        "transformer.r": 2, "transformer.lora_alpha": 6, "transformer.target_modules": sorted(tiny_lora("sd3").targets),
    }  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_full_weights_open_with_from_pretrained(family, tmp_path):
    mine = trained(family, trainable="full")
    asked = question(mine)
    folder = export_policy(mine, tmp_path / "export")
    assert "config.json" in {path.name for path in folder.iterdir()}
    fresh = type(mine.transformer).from_pretrained(folder, local_files_only=True)
    assert torch.equal(with_transformer(mine, fresh)(*asked), mine(*asked))
    assert not torch.equal(with_transformer(mine, TRANSFORMERS[family]())(*asked), mine(*asked))
    name = type(mine.transformer).__name__
    assert how_to_open(mine, folder) == f"transformer = {name}.from_pretrained({json.dumps(str(folder))})"


@pytest.mark.parametrize("options", [{}, {"trainable": "full"}], ids=["lora", "full"])
def test_exporting_leaves_no_trace_in_the_policy(options, tmp_path):
    mine = trained("sd3", **options).train()
    if not options:
        adapter_layers(mine)[0].lora_A["default"].weight.requires_grad_(False)  # frozen on purpose
    before, random_state = state_of(mine), torch.get_rng_state()
    loss = mine.eval()(*question(mine)).sum()
    mine.train()
    export_policy(mine, tmp_path / "export")
    loss.backward()  # through the graph of before
    assert state_of(mine) == before and torch.equal(torch.get_rng_state(), random_state)


def test_what_wraps_the_policy_is_not_exported(tmp_path):
    mine = trained("sd3")
    plain = export_policy(mine, tmp_path / "plain")
    guided = export_policy(ClassifierFreeGuidance(mine, scale=3.0), tmp_path / "guided")
    ours, theirs = load_file(plain / FILE), load_file(guided / FILE)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], t) for name, t in theirs.items())


def test_fp32_adapters_on_bf16_weights_keep_every_bit(tmp_path):
    pipe = pipeline("flux")
    pipe.transformer.to(torch.bfloat16)
    mine = policy("flux", pipe)
    move(mine)
    folder = export_policy(mine, tmp_path / "lora")
    assert {tensor.dtype for tensor in load_file(folder / FILE).values()} == {torch.float32}
    full = policy("sd3", trainable="full").to(torch.bfloat16)
    export_policy(full, tmp_path / "full")
    loaded = type(full.transformer).from_pretrained(tmp_path / "full", torch_dtype=torch.bfloat16)
    assert all(torch.equal(loaded.state_dict()[name], t) for name, t in full.transformer.state_dict().items())


def test_the_embedded_policy_exports_too(tmp_path):
    mine = ShapesPolicy(None, num_layers=1, width=16, num_heads=2).eval()
    folder = export_policy(mine, tmp_path / "shapes")
    fresh = type(mine.transformer).from_pretrained(folder, local_files_only=True)
    assert all(torch.equal(fresh.state_dict()[name], t) for name, t in mine.transformer.state_dict().items())


def without_alpha(transformer, folder, write=adapters.write_adapters):
    """As files without metadata are: read with alpha = r."""
    alpha, transformer.peft_config["default"].lora_alpha = transformer.peft_config["default"].lora_alpha, 2
    write(transformer, folder)
    transformer.peft_config["default"].lora_alpha = alpha


def with_one_layer_missing(transformer, folder, write=adapters.write_adapters):
    write(transformer, folder)
    with safe_open(folder / FILE, framework="pt") as file:
        header = file.metadata()
    tensors = load_file(folder / FILE)
    for half in "AB":
        del tensors[f"transformer.transformer_blocks.0.attn.to_q.lora_{half}.weight"]
    save_file(tensors, folder / FILE, metadata=header)


@pytest.mark.parametrize("spoil", [without_alpha, with_one_layer_missing])
def test_the_check_notices_a_wrong_file_and_keeps_nothing(spoil, tmp_path, monkeypatch):
    mine = trained("sd3")
    before = state_of(mine)
    monkeypatch.setattr(export, "write_adapters", spoil)
    with pytest.raises(RuntimeError, match="the exported adapters give a velocity .* away.*nothing is kept"):
        export_policy(mine, tmp_path / "export")
    assert not list(tmp_path.iterdir()) and state_of(mine) == before


def with_other_tensors(transformer, folder):
    other = copy.deepcopy(transformer)
    with torch.no_grad():
        other.proj_out.bias[0] += 1e-6
    other.save_pretrained(folder)


def with_another_config(transformer, folder):
    other = copy.deepcopy(transformer)
    other.register_to_config(eps=1.0)
    other.save_pretrained(folder)


@pytest.mark.parametrize(
    ("family", "spoil", "message"),
    [
        ("sd3", with_other_tensors, "proj_out.bias in the exported files is not what was trained"),
        ("wan21", with_another_config, "its config.json does not describe it"),
    ],
)
def test_the_check_of_full_weights_compares_bits_and_velocities(family, spoil, message, tmp_path, monkeypatch):
    mine = trained(family, trainable="full")
    before = state_of(mine)
    monkeypatch.setattr(export, "write_full", spoil)
    with pytest.raises(RuntimeError, match=message):
        export_policy(mine, tmp_path / "export")
    assert not list(tmp_path.iterdir()) and state_of(mine) == before


def test_an_existing_folder_is_not_touched(tmp_path):
    (tmp_path / "mine.txt").touch()
    with pytest.raises(ValueError, match="exists: export to a new folder"):
        export_policy(trained("sd3"), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_policies_that_diffusers_does_not_know(tmp_path):
    with pytest.raises(ValueError, match="TinyPolicy holds no diffusers transformer"):
        export_policy(TinyPolicy(), tmp_path / "export")
    mine = trained("sd3")
    mine.transformer.__class__ = type("Unheard", (type(mine.transformer),), {})
    with pytest.raises(ValueError, match="no LoRA format for Unheard: export one of SD3Transformer2DModel"):
        export_policy(mine, tmp_path / "export")
    assert not list(tmp_path.iterdir())

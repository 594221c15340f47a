"""The user's command on the folder of a run that the user's command made."""

import json
import runpy
import sys

import pytest
import torch
import yaml
from safetensors.torch import load_file

from lightning_modules.export.__main__ import main
from tests.command_line import fit, run_of, write
from tests.tiny_models import SIZE, TOKENS, TRANSFORMERS, pipeline, tiny_lora

FILE = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of an SD3 LoRA run with an average and an export."""
    root = tmp_path_factory.mktemp("run")
    pipeline("sd3").save_pretrained(root / "base")
    lora = tiny_lora("sd3")
    policy = {
        "class_path": "lightning_modules.policies.sd3.SD3Policy.from_pretrained",
        "init_args": {
            "path": str(root / "base"), "height": SIZE["sd3"], "width": SIZE["sd3"], "dtype": "float32",
            "max_sequence_length": TOKENS,
            "lora": {"rank": 2, "alpha": 6, "targets": list(lora.targets)},
        },
    }  # fmt: skip
    callbacks = [
        {"class_path": "callbacks.ema.EMA", "init_args": {"decay": 0.9}},
        {"class_path": "callbacks.export.Export"},
    ]
    return run_of(fit(write(root, iterations=2, model={"policy": policy, "num_steps": 3}, callbacks=callbacks)))


def content_of(run):
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)


def as_in_the_file(weights):
    return {name.replace("policy.", "").replace(".default.", "."): tensor for name, tensor in weights.items()}


def assert_equal(ours, theirs):
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_by_default_it_exports_what_is_evaluated(run, tmp_path, capsys):
    folder = main(["--config", str(run / "config.yaml"), "--folder", str(tmp_path / "adapter")])
    assert folder == tmp_path / "adapter"
    averages = as_in_the_file(content_of(run)["callbacks"]["EMA"]["weights"])
    assert_equal(load_file(folder / FILE), averages)
    assert_equal(load_file(run / "export" / "iteration_000002" / FILE), averages)  # the callback's, during the run
    assert capsys.readouterr().out == (
        f"averaged weights after iteration 2, written to {folder}; open it with\n"
        f"  pipe.load_lora_weights({json.dumps(str(folder))})\n"
    )


def test_raw_weights_of_a_named_checkpoint_as_a_module(run, tmp_path, monkeypatch, capsys):
    checkpoint, folder = run / "checkpoints" / "iteration_000002.ckpt", tmp_path / "raw"
    command = f"export --raw --config {run}/config.yaml --folder {folder} --ckpt_path {checkpoint}"
    monkeypatch.setattr(sys, "argv", command.split())
    runpy.run_module("lightning_modules.export", run_name="__main__")
    trained = as_in_the_file(content_of(run)["state_dict"])
    assert_equal(load_file(folder / FILE), trained)
    averages = load_file(run / "export" / "iteration_000002" / FILE)
    assert any(not torch.equal(averages[name], t) for name, t in trained.items())
    assert "trained weights after iteration 2" in capsys.readouterr().out


def test_a_full_run_of_the_embedded_policy(tmp_path):
    policy = {
        "class_path": "lightning_modules.policies.shapes.ShapesPolicy",
        "init_args": {"weights": None, "num_layers": 1, "width": 16, "num_heads": 2},
    }
    run = run_of(fit(write(tmp_path, iterations=1, model={"policy": policy, "num_steps": 3})))
    folder = main(["--config", str(run / "config.yaml"), "--folder", str(tmp_path / "weights")])
    loaded = type(TRANSFORMERS["sd3"]()).from_pretrained(folder, local_files_only=True)
    trained = content_of(run)["state_dict"]
    assert_equal({f"policy.transformer.{name}": p for name, p in loaded.named_parameters()}, trained)


def test_what_is_no_config_and_no_checkpoint(run, tmp_path):
    (tmp_path / "config.yaml").write_text("trainer: {}")
    with pytest.raises(ValueError, match="config.yaml is no config of a run .*give the one in a run's folder"):
        main(["--config", str(tmp_path / "config.yaml"), "--folder", str(tmp_path / "x")])
    (tmp_path / "cut.ckpt").write_bytes((run / "checkpoints" / "last.ckpt").read_bytes()[:1000])
    torch.save({"state_dict": {}}, tmp_path / "foreign.ckpt")
    for file, message in (
        ("cut.ckpt", "cut.ckpt is no readable checkpoint"),
        ("none.ckpt", "none.ckpt is no readable checkpoint"),
        ("foreign.ckpt", "foreign.ckpt was not written by LeanGRPO"),
    ):
        with pytest.raises(ValueError, match=message):
            main(f"--config {run}/config.yaml --folder {tmp_path}/x --ckpt_path {tmp_path / file}".split())


def test_a_checkpoint_of_another_run(run, tmp_path):
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["model"]["init_args"]["policy"]["init_args"]["lora"]["rank"] = 3
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    with pytest.raises(ValueError, match="holds another policy.*use the run's own config.yaml"):
        main(f"--config {tmp_path}/config.yaml --folder {tmp_path}/x --ckpt_path {run}/checkpoints/last.ckpt".split())
    assert not (tmp_path / "x").exists()

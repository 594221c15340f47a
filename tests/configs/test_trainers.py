"""The groups in ``configs/trainer`` over any run: what they set, and nothing else."""

import contextlib
import inspect
import io
from pathlib import Path

import pytest
import yaml
from lightning.pytorch import Trainer

from lightning_modules.strategies import FSDP2Strategy, check_strategy
from train import main

ROOT = Path(__file__).resolve().parents[2]
GROUPS = sorted((ROOT / "configs/trainer").glob("*.yaml"))
RUNS = ("configs/quickstart.yaml", "configs/experiment/flux_dev/leangrpo.yaml")
FSDP2 = "lightning_modules.strategies.FSDP2Strategy"


def resolved(*args):
    """The config that a command line stands for."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        main(["fit", *args, "--print_config"])
    return yaml.safe_load(out.getvalue())


def differences(ours, theirs, path=""):
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key in ours.keys() | theirs.keys():
            yield from differences(ours.get(key), theirs.get(key), f"{path}.{key}".lstrip("."))
    elif ours != theirs:
        yield path, ours


@pytest.fixture(scope="module")
def without():
    with contextlib.chdir(ROOT):
        return {run: resolved("--config", run) for run in RUNS}


def test_the_groups_are_there():
    assert {path.stem for path in GROUPS} == {"cpu", "ddp", "fsdp2", "fsdp2_hybrid", "single_gpu_small"}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("group", GROUPS, ids=lambda path: path.stem)
def test_it_changes_what_it_names_alone(group, run, without, monkeypatch):
    monkeypatch.chdir(ROOT)
    written = yaml.safe_load(group.read_text())
    named = {f"trainer.{key}": value for key, value in written["trainer"].items()}
    named |= {f"model.init_args.{key}": value for key, value in written.get("model", {}).get("init_args", {}).items()}
    config = resolved("--config", run, "--config", str(group))
    assert dict(differences(config, without[run])).keys() - {"config"} <= named.keys()
    for path, value in named.items():
        found = config
        for key in path.split("."):
            found = found[key]
        assert found == value, path


@pytest.mark.parametrize("group", GROUPS, ids=lambda path: path.stem)
def test_it_says_how_it_is_used(group):
    head = group.read_text().split("\n\n")[0]
    assert f"--config configs/trainer/{group.name}" in head
    assert set(yaml.safe_load(group.read_text())["trainer"]) <= set(inspect.signature(Trainer).parameters)


@pytest.mark.parametrize(("name", "kind"), [("cpu", "single"), ("ddp", "replicated"), ("single_gpu_small", "single")])
def test_a_plain_strategy_is_one_that_is_proven(name, kind):
    options = yaml.safe_load((ROOT / f"configs/trainer/{name}.yaml").read_text())["trainer"]
    trainer = Trainer(**(options | {"accelerator": "cpu", "devices": 1, "logger": False}))
    assert check_strategy(trainer.strategy) == kind


@pytest.mark.parametrize(("name", "replicate", "nodes"), [("fsdp2", 1, 1), ("fsdp2_hybrid", "nodes", 2)])
def test_the_sharded_ones_make_their_strategy(name, replicate, nodes):
    options = yaml.safe_load((ROOT / f"configs/trainer/{name}.yaml").read_text())["trainer"]
    assert options["strategy"]["class_path"] == FSDP2
    assert FSDP2Strategy(**options["strategy"]["init_args"]).replicate == replicate
    assert options["num_nodes"] == nodes


def test_a_small_device_keeps_the_groups_size(without, monkeypatch):
    monkeypatch.chdir(ROOT)
    for run in RUNS:
        model = resolved("--config", run, "--config", "configs/trainer/single_gpu_small.yaml")["model"]["init_args"]
        assert (model["micro_batch"], model["groups_in_flight"]) == (1, 1)
        assert model["generations_per_prompt"] == without[run]["model"]["init_args"]["generations_per_prompt"]


def test_a_number_on_the_command_line_beats_the_group(monkeypatch):
    monkeypatch.chdir(ROOT)
    trainer = resolved(
        "--trainer.num_nodes", "4", "--config", RUNS[0], "--config", str(GROUPS[0].with_stem("fsdp2_hybrid"))
    )
    assert trainer["trainer"]["num_nodes"] == 4

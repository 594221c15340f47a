"""Every config of the repository parses, and names every argument of this project's classes.

Runs stand in ``configs/`` itself and in ``configs/experiment`` (see ``tests/configs``); the other folders hold the parts that
experiments are composed of. A class switched on the command line keeps arguments of the same name from the file it was
written in; where a file names all of them, a reader sees which those are, and no default can hide.
"""

import importlib
import inspect
import os
from pathlib import Path

import pytest
import yaml
from jsonargparse import ArgumentParser

from train import main

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted((ROOT / "configs").rglob("*.yaml"))
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
OURS = ("lightning_modules", "datamodules", "rewards", "callbacks")


def ids(path):
    return str(path.relative_to(ROOT))


def instances(node, where=""):
    """(place in the file, class path, init_args) of every class that a config instantiates."""
    if isinstance(node, dict):
        if "class_path" in node:
            yield where, node["class_path"], node.get("init_args") or {}
        for key, child in node.items():
            yield from instances(child, f"{where}.{key}".lstrip("."))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from instances(child, f"{where}[{index}]")


def arguments(class_path):
    """What a class, or a class method that makes one (``SD3Policy.from_pretrained``), takes; options that it hands on to
    its base class included."""
    path, _, name = class_path.rpartition(".")
    try:
        made, method = getattr(importlib.import_module(path), name), None
    except ModuleNotFoundError:
        module, _, kind = path.rpartition(".")
        made, method = getattr(importlib.import_module(module), kind), name
    parameters = inspect.signature(getattr(made, method) if method else made).parameters.values()
    if method is None and not any(p.kind is p.VAR_KEYWORD for p in parameters):
        return {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    parser = ArgumentParser()
    return set(parser.add_method_arguments(made, method) if method else parser.add_class_arguments(made))


def complaints(config):
    """What a config leaves unnamed of this project's classes, and what it gives that a class does not take."""
    found = []
    for where, class_path, given in instances(config):
        named = arguments(class_path)
        if unknown := given.keys() - named:
            found.append(f"{where}: {class_path} takes no {sorted(unknown)}")
        if class_path.split(".")[0] in OURS and (missing := named - given.keys()):
            found.append(f"{where}: {class_path} has {sorted(missing)} unnamed")
    return found


def test_there_are_configs():
    assert ROOT / "configs" / "quickstart.yaml" in CONFIGS


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_every_argument_is_named(path):
    assert complaints(yaml.safe_load(path.read_text())) == []


@pytest.mark.parametrize("path", CONFIGS, ids=ids)
def test_it_parses(path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit) as exit:
        main(["fit", "--config", str(path), "--print_config"])
    assert exit.value.code == 0
    resolved = yaml.safe_load(capsys.readouterr().out)
    written = yaml.safe_load(path.read_text())
    assert resolved["model"]["class_path"] == written["model"]["class_path"]


@pytest.mark.parametrize("path", FILES, ids=ids)
def test_the_files_it_reads_are_in_the_repository(path):
    """Prompt files and weights are named relative to the repository."""
    for where, _, given in instances(yaml.safe_load(path.read_text())):
        for name, value in given.items():
            if isinstance(value, str) and value.endswith((".jsonl", ".txt", ".safetensors")) and name != "weights_path":
                assert not os.path.isabs(value), f"{where}.{name}"
                assert (ROOT / value).is_file(), f"{where}.{name}: {value}"


def test_an_unnamed_and_an_unknown_argument_are_found():
    config = {
        "model": {
            "window": {"class_path": "lightning_modules.flow.windows.FixedWindow", "init_args": {"start": 0, "stop": 2}}
        }
    }
    assert complaints(config) == [
        "model.window: lightning_modules.flow.windows.FixedWindow takes no ['stop']",
        "model.window: lightning_modules.flow.windows.FixedWindow has ['size', 'stochastic'] unnamed",
    ]

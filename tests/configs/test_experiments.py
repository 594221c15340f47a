"""Every experiment, as its command line runs it, with tiny components in place of the released ones."""

from __future__ import annotations

import copy
import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import Namespace

from benchmarks.plan import plan_config, read_config, summary
from lightning_modules.policies import flux, sd3, wan
from lightning_modules.policies.loading import DTYPES, Parts
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from rewards import hpsv2, ocr, pickscore, remote  # noqa: F401  (what the experiments name)
from rewards.base import Reward
from tests.headers import header_of
from tests.loop import Scorer, fit
from tests.tiny_models import SIZE, TOKENS, TRANSFORMERS, pipeline
from train import main

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENTS = sorted((ROOT / "configs/experiment").rglob("*.yaml"))
FAMILY = {
    "sd35_medium": "sd3",
    "flux_dev": "flux",
    "wan21_1_3b": "wan21",
    "wan21_14b": "wan21",
    "wan22_ti2v_5b": "wan22",
}


def name(file):
    return f"{file.parent.name}/{file.stem}"


def first(file):
    """One of each model's."""
    return file == min(EXPERIMENTS, key=lambda other: (other.parent != file.parent, other.name))


SLOW = (pytest.mark.slow, pytest.mark.timeout(600))
every_experiment = pytest.mark.parametrize("file", EXPERIMENTS, ids=name)


def read(file):
    return yaml.safe_load(file.read_text())


def policy_node(config):
    """(the pretrained policy's ``init_args``, their place on the command line), inside any guidance."""
    place, node = "--model.init_args.policy.init_args", config["model"]["init_args"]["policy"]["init_args"]
    if "policy" in node:
        return node["policy"]["init_args"], f"{place}.policy.init_args"
    return node, place


@pytest.fixture
def tiny_weights(monkeypatch):
    """What the loaders read in place of a hub's files; ``asked`` keeps what they were asked for."""
    asked = {}

    def load_parts(family, path, *, variant, revision, dtype, **options):
        name = {"StableDiffusion3Pipeline": "sd3", "FluxPipeline": "flux"}.get(
            family.pipeline_class.__name__, "wan22" if "TI2V-5B" in path else "wan21"
        )
        asked.update(path=path, family=name, **options)
        pipe = pipeline(name)
        return Parts(transformer=TRANSFORMERS[name]().to(DTYPES[dtype]), text=family.text_class(pipe), vae=pipe.vae)

    for module in (sd3, flux, wan):
        monkeypatch.setattr(module, "load_parts", load_parts)
    return asked


@pytest.fixture
def no_reward_weights(monkeypatch):
    """Every reward judges colour; what it would load stays unread."""
    for kind in _subclasses(Reward):
        monkeypatch.setattr(kind, "load", lambda self: None)
    monkeypatch.setattr(Reward, "__call__", lambda self, images, prompts, metadata: colour(images.cpu()))


def _subclasses(kind):
    return {kind, *(below for sub in kind.__subclasses__() for below in _subclasses(sub))}


def small(file):
    """(argument of the policy -> value, argument of ``LeanGRPO`` -> value) that make the experiment one of seconds."""
    config, family = read(file), FAMILY[file.parent.name]
    frames = min(policy_node(config)[0]["frames"], 5)
    size = {"height": SIZE[family], "width": 2 * SIZE[family], "frames": frames, "max_sequence_length": TOKENS}
    steps = min(config["model"]["init_args"]["num_steps"], 8)
    return size, {"num_steps": steps, "eval_num_steps": 2, "generations_per_prompt": 2, "micro_batch": 2}


def command_line(file, root):
    """The experiment's own, with everything that has a size made small."""
    policy, loop = small(file)
    options = {
        "--trainer.accelerator": "cpu",
        "--trainer.default_root_dir": root,
        "--data.init_args.prompts_per_step": 1,
        "--data.init_args.iterations": 2,
        **{f"--model.init_args.{name}": value for name, value in loop.items()},
        **{f"{policy_node(read(file))[1]}.{name}": value for name, value in policy.items()},
    }
    return ["fit", "--config", str(file), *(str(part) for option in options.items() for part in option)]


def colour(images):
    """A smooth reward of images and videos."""
    return -(images.double().flatten(2).mean(2) - torch.tensor([0.8, 0.4, 0.2])).square().sum(1)


@every_experiment
def test_it_trains_the_same_way_under_every_schedule(file, tiny_weights, tmp_path):
    """Two iterations of each, from the same start on the same noise: Retain's are Native's, and Reweight's differ by the
    precision's rounding, since its trained steps run sample by sample."""
    parser, config = read_config(file)
    policy, loop = small(file)
    node = config.model.init_args.policy.init_args
    (node.policy.init_args if "policy" in node else node).update(Namespace(policy))
    config.model.init_args.update(Namespace(loop))
    model = parser.instantiate_classes(config).model
    start, stories = copy.deepcopy(model.state_dict()), {}
    for schedule in (Native(), Retain(), Reweight()):
        model.load_state_dict(start)
        model.schedule, model.iteration = schedule, 0
        stories[type(schedule)] = fit(
            model,
            2,
            root=tmp_path,
            scorer=Scorer(colour),
            prompts=["a red circle"],
            precision=config.trainer["precision"],
        )
        moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, start[name])}
        assert moved and moved <= {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for native, retain, reweight in zip(*(stories[kind] for kind in (Native, Retain, Reweight)), strict=True):
        assert native["grad_norm"] > 0
        for name in ("reward", "grad_norm"):
            assert retain[name] == native[name], name
            assert reweight[name] == pytest.approx(native[name], rel=0.05), name


@pytest.mark.parametrize("file", [pytest.param(f, marks=() if first(f) else SLOW) for f in EXPERIMENTS], ids=name)
def test_its_command_line_runs(file, tiny_weights, no_reward_weights, tmp_path, capsys):
    """Parsed, linked, instantiated and trained as a user does it, with the callbacks, the plan and the export."""
    cli = main(command_line(file, tmp_path / "runs"))
    assert (tiny_weights["path"], tiny_weights["family"]) == (
        policy_node(read(file))[0]["path"],
        FAMILY[file.parent.name],
    )
    assert cli.model.iteration == 2
    assert f"under {type(cli.model.schedule).__name__}" in capsys.readouterr().out
    assert (tmp_path / "runs/version_0/plan.json").is_file()
    assert any((tmp_path / "runs/version_0/export/iteration_000002").iterdir())


def original_recipe(file):
    """The command line in the header, if it has one, that takes the authors' two optimizer steps per rollout."""
    _, announced, command = header_of(file).partition("(Native alone can): python train.py ")
    return shlex.split(command.replace("\\ ", "")) if announced else None


@every_experiment
def test_one_step_on_half_of_the_prompts_names_the_original_two(file):
    config = read(file)
    whole = 2 * config["data"]["init_args"]["prompts_per_step"]
    steps_twice = "two optimizer steps per rollout" in header_of(file)
    assert (original_recipe(file) is not None) == steps_twice
    if steps_twice:
        assert f"{whole} prompts x {config['model']['init_args']['generations_per_prompt']}" in header_of(file)
        assert original_recipe(file) == [
            *("fit", "--config", str(file.relative_to(ROOT)), "--data.init_args.prompts_per_step", str(whole)),
            *("--model.init_args.schedule", "configs/schedule/native_two_updates.yaml"),
        ]


def test_the_original_recipe_runs(tiny_weights, no_reward_weights, tmp_path, monkeypatch):
    """The header's own words. The second step is off policy: its ratio has left 1."""
    monkeypatch.chdir(ROOT)
    file = ROOT / "configs/experiment/flux_dev/flowgrpo.yaml"
    fit, option, _, *smaller = command_line(file, tmp_path / "runs")
    assert original_recipe(file)[:2] == [fit, option]
    cli = main([*original_recipe(file), *smaller, "--model.init_args.micro_batch", "1"])
    model = cli.model
    assert (type(model.schedule), model.iteration, cli.trainer.global_step) == (Native, 2, 4)
    deviations = [value for name, value in model.iteration_metrics.items() if name.startswith("ratio_deviation/")]
    assert len(deviations) == 5 and max(deviations) > 0


def test_a_recipe_of_three_updates_is_one_option_more(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    line = original_recipe(ROOT / "configs/experiment/flux_dev/dancegrpo.yaml")
    with pytest.raises(SystemExit):
        main([*line, "--model.init_args.schedule.init_args.updates_per_rollout", "3", "--print_config"])
    resolved = yaml.safe_load(capsys.readouterr().out)
    assert resolved["model"]["init_args"]["schedule"]["init_args"] == {
        "updates_per_rollout": 3,
        "samples_per_update": "part",
        "micro_batch": None,
    }
    assert resolved["data"]["init_args"]["prompts_per_step"] == 16


@every_experiment
def test_the_header_says_how_to_run_it_and_what_it_takes(file):
    header = header_of(file)
    path = file.relative_to(ROOT)
    assert f"python train.py fit --config {path}" in header
    assert read(file)["trainer"]["default_root_dir"] == f"runs/{file.parent.name}/{file.stem}"
    assert re.search(r"Plan: [\d.]+ GiB = weights", header) and re.search(r"GPUs?: ", header)


@pytest.mark.slow
@pytest.mark.timeout(600)
@every_experiment
def test_the_memory_in_every_header_is_the_plans(file):
    assert f"Plan: {summary(plan_config(file))} " in header_of(file)


@every_experiment
def test_learning_rate_and_guidance_fit_what_is_trained(file):
    """A LoRA's rate destroys full weights, which a full rate hardly moves in a LoRA."""
    config = read(file)
    rate = float(
        yaml.safe_load((file.parent / config["model"]["init_args"]["optimizer"]).read_text())["init_args"]["lr"]
    )
    node, _ = policy_node(config)
    if node["trainable"] == "lora":
        assert 1e-4 <= rate <= 3e-4 and node["lora"] is not None and node["dtype"] == "bfloat16"
    else:
        assert 5e-6 <= rate <= 2e-5 and node["lora"] is None
        assert (node["dtype"], config["trainer"]["precision"]) == ("float32", "bf16-mixed")  # master weights


@every_experiment
def test_wans_flow_shift_fits_the_resolution(file):
    """3 up to 480p (832 x 480), 5 at 720p (1280 x 720)."""
    config = read(file)
    node, _ = policy_node(config)
    sigmas = yaml.safe_load((file.parent / config["model"]["init_args"]["sigmas"]).read_text())
    if "wan" in file.parent.name:
        large = node["height"] * node["width"] > 832 * 480
        assert sigmas["init_args"]["shift"] == (5.0 if large else 3.0)


def test_a_config_without_a_pretrained_policy_is_named():
    with pytest.raises(ValueError, match="ShapesPolicy is no pretrained policy"):
        plan_config(ROOT / "configs/quickstart.yaml")

"""The benchmarks' config files make what they say, and run through the command line."""

import json
from pathlib import Path

import pytest
from jsonargparse import ArgumentParser
from lightning.pytorch import Callback

from callbacks.benchmark import Benchmark
from callbacks.results import read_result
from lightning_modules.types import DrawingSettings
from train import main

ROOT = Path(__file__).resolve().parents[2]
NAMES = {"geneval": "geneval_hf", "hpsv2": "hpsv2_v2_1", "prompt_set": "prompt_set"}


@pytest.mark.parametrize("file", NAMES)
def test_a_config_makes_its_benchmark(file):
    parser = ArgumentParser()
    parser.add_subclass_arguments(Callback, "callback")
    parsed = parser.parse_object({"callback": str(ROOT / f"configs/callback/{file}.yaml")})
    made = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.49
    benchmark = made(parsed).callback
    assert isinstance(benchmark, Benchmark)
    assert (benchmark.name, benchmark.sampler) == (NAMES[file], DrawingSettings(num_steps=40))


def test_through_the_command_line(tmp_path, monkeypatch, capsys):
    """GenEval on two prompts of the embedded world, by ``validate``, with the quickstart's policy."""
    prompts = (ROOT / "datamodules/shapes_prompts/heldout_metadata.jsonl").read_text().splitlines()[:2]
    (tmp_path / "two.jsonl").write_text("\n".join(prompts))
    judge = {
        "class_path": "rewards.geneval.GenEval",
        "init_args": {
            "detector": {"class_path": "rewards.shapes_vision.ShapesDetector"},
            "colors": {"class_path": "rewards.shapes_vision.ShapesColors"},
            "threshold": 0.0,
            "counting_threshold": 0.0,
        },
    }
    callback = {
        "class_path": "callbacks.geneval_evaluation.GenEvalEvaluation",
        "init_args": {"prompts": str(tmp_path / "two.jsonl"), "judge": judge, "sampler": {"num_steps": 3}},
    }
    monkeypatch.chdir(ROOT)
    command = ["validate", "--config", "configs/quickstart.yaml", "--trainer.default_root_dir", str(tmp_path / "runs")]
    command += ["--trainer.callbacks", json.dumps([callback]), "--trainer.limit_val_batches", "1"]
    main([*command, "--data.init_args.eval_batch_size", "4"])
    result = read_result(tmp_path / "runs/version_0/evaluations/geneval_shapes/iteration_000000")
    assert result["settings"]["sampler"]["num_steps"] == 3
    assert len(result["prompts"]) == 2 and len(result["prompts"][0]["scores"]["correct"]) == 4
    assert "eval/geneval_shapes" in capsys.readouterr().out

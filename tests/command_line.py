"""A complete config of seconds: the tiny policy, the brightness reward, four prompts; and the run folders it makes."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
import yaml

from train import main

PROMPTS = ("a red circle", "two blue squares", "a cross left of a ring", "a green triangle")
BRIGHTNESS = {"class_path": "rewards.brightness.Brightness", "init_args": {"target": [0.8, 0.4, 0.2]}}


def schedule(name, **init_args):
    return {"class_path": f"lightning_modules.schedules.{name.lower()}.{name}", "init_args": init_args}


RETAIN = schedule("Retain")


def config(root: Path, *, iterations=4, schedule=RETAIN, callbacks=(), model=None, data=None) -> dict:
    """The config as a dict; ``model`` and ``data`` are init_args on top."""
    flow = "lightning_modules.flow"
    return {
        "seed_everything": 7,
        "trainer": {
            "default_root_dir": str(root / "runs"),
            "accelerator": "cpu",
            "devices": 1,
            "num_sanity_val_steps": 0,
            "enable_model_summary": False,
            "enable_progress_bar": False,
            "callbacks": [
                {
                    "class_path": "callbacks.reward_scoring.RewardScoring",
                    "init_args": {"rewards": {"brightness": BRIGHTNESS}},
                },
                {"class_path": "callbacks.checkpoint.IterationCheckpoint", "init_args": {"every": 2, "keep": 2}},
                *callbacks,
            ],
        },
        "model": {
            "class_path": "lightning_modules.lean_grpo.LeanGRPO",
            "init_args": {
                "policy": {"class_path": "tests.tiny.TinyPolicy", "init_args": {"seed": 1}},
                "schedule": schedule,
                "transition": {"class_path": f"{flow}.transitions.FlowSDE", "init_args": {"noise_level": 0.7}},
                "sigmas": {"class_path": f"{flow}.sigmas.LinearSigmas", "init_args": {"shift": 3.0}},
                "window": {"class_path": f"{flow}.windows.Fraction", "init_args": {"fraction": 0.7}},
                "advantage": {"class_path": "lightning_modules.advantages.GroupAdvantage", "init_args": {"clip": None}},
                "optimizer": {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.01}},
                "lr_scheduler": {"class_path": "torch.optim.lr_scheduler.ExponentialLR", "init_args": {"gamma": 0.9}},
                "num_steps": 4,
                "generations_per_prompt": 4,
                **(model or {}),
            },
        },
        "data": {
            "class_path": "datamodules.prompt_data.PromptDataModule",
            "init_args": {
                "train": str(root / "prompts.txt"),
                "prompts_per_step": 3,
                "iterations": iterations,
                "images_per_prompt": 2,
                **(data or {}),
            },
        },
    }


def write(root: Path, name="tiny.yaml", **options) -> str:
    """Write the config and its prompts into ``root`` -> the config's path."""
    root.mkdir(parents=True, exist_ok=True)
    (root / "prompts.txt").write_text("".join(f"{prompt}\n" for prompt in PROMPTS))
    path = root / name
    path.write_text(yaml.safe_dump(config(root, **options)))
    return str(path)


def fit(path: str, *options: str):
    """``train.py fit`` in this process -> the finished CLI."""
    return main(["fit", "--config", path, *options])


def run_of(cli) -> Path:
    return Path(cli.trainer.default_root_dir)


def rows(run: Path) -> dict[int, dict[str, str]]:
    """iteration -> its line of metrics.csv, without what the clock decides."""
    with open(run / "metrics.csv", newline="") as file:
        lines = [line for line in csv.DictReader(file) if line.get("iteration")]
    return {
        int(float(line["iteration"])): {k: v for k, v in line.items() if "seconds" not in k and "memory" not in k}
        for line in lines
    }


def load(path: Path) -> dict:
    return torch.load(path, weights_only=True)

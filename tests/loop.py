"""LeanGRPO on the tiny policy through a real Trainer, with data and rewards reduced to a few lines."""

from __future__ import annotations

import functools

import torch
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.sigmas import LinearSigmas
from lightning_modules.flow.transitions import FlowSDE
from lightning_modules.flow.windows import AllButLast
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.schedules.retain import Retain
from lightning_modules.types import PromptBatch
from tests.tiny import TinyPolicy

PROMPTS = ("a red circle", "two blue squares")


def smooth_reward(images):
    """Negative distance of the mean colour to a target: differentiable in every pixel, so equal images score equal."""
    target = torch.tensor([0.8, 0.4, 0.2])
    return -(images.double().mean(dim=(2, 3)) - target).square().sum(dim=1)


class Scorer(Callback):
    """Scores with a function of the images; ``sizes`` keeps how many samples it was shown at a time."""

    def __init__(self, reward=smooth_reward):
        self.reward, self.sizes = reward, []

    def on_rollout_end(self, trainer, pl_module, samples, scores):
        self.sizes.append(len(samples))
        scores.values["reward"] = self.reward(samples.images.cpu())


class Recorder(Callback):
    """Keeps every iteration's metrics."""

    def __init__(self):
        self.metrics = []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.metrics.append({k: float(v) for k, v in trainer.callback_metrics.items()})


def batches(iterations, prompts=PROMPTS):
    data = [PromptBatch(prompts=prompts, metadata=({},) * len(prompts), iteration=k) for k in range(iterations)]
    return DataLoader(data, batch_size=None)  # type: ignore[arg-type]


def module(schedule=None, *, policy=None, lr=1e-2, optimizer=torch.optim.AdamW, **options):
    defaults = {
        "policy": policy or TinyPolicy(seed=1),
        "schedule": schedule or Retain(),
        "transition": FlowSDE(0.7),
        "sigmas": LinearSigmas(3.0),
        "window": AllButLast(),
        "advantage": GroupAdvantage(clip=None),
        "optimizer": functools.partial(optimizer, lr=lr),
        "num_steps": 4,
        "generations_per_prompt": 4,
    }
    return LeanGRPO(**(defaults | options))


def fit(model, iterations=3, *, root, scorer=None, callbacks=(), prompts=PROMPTS, **trainer):
    scorer, recorder = scorer or Scorer(), Recorder()
    options = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "logger": False, "enable_checkpointing": False,
               "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": root}  # fmt: skip
    ckpt_path = trainer.pop("ckpt_path", None)
    Trainer(**(options | trainer), callbacks=[scorer, recorder, *callbacks]).fit(
        model, batches(iterations, prompts), ckpt_path=ckpt_path
    )
    return recorder.metrics

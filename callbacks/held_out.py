"""Draw held-out samples in the middle of training without leaving a trace in it."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer

from datamodules.eval_batch import EvalBatch
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.types import Samples


@contextmanager
def undisturbed(pl_module: LeanGRPO) -> Iterator[None]:
    """Restore the random states (Python, NumPy, torch on the CPU and the module's device) and every module's training
    mode at the end, also after an exception. No gradient is recorded."""
    python, numpy_state = random.getstate(), np.random.get_state()
    modes = {module: module.training for module in pl_module.modules()}
    devices = [pl_module.device] if pl_module.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy_state)
        for module, mode in modes.items():
            module.training = mode


def draw_samples(trainer: Trainer, pl_module: LeanGRPO, batches: Iterable[EvalBatch]) -> Iterator[Samples]:
    """The images that ``trainer.test`` would draw: :meth:`test_step` in the trainer's precision, batch by batch."""
    for index, batch in enumerate(batches):
        with trainer.precision_plugin.test_step_context():
            samples = pl_module.test_step(batch, index)
        if len(samples):
            yield samples


def held_out_batches(trainer: Trainer) -> Iterable[EvalBatch]:
    """The datamodule's test set. Errors: ``ValueError`` without a datamodule (or, from it, without a test set)."""
    return _datamodule(trainer).test_dataloader()


def validation_batches(trainer: Trainer) -> Iterable[EvalBatch]:
    """The datamodule's validation set. Errors: ``ValueError`` without one."""
    batches = _datamodule(trainer).val_dataloader()
    if not len(batches):
        raise ValueError(
            "no validation prompts: set data.init_args.val to a prompt file, or evaluate on the test set only"
        )
    return batches


def _datamodule(trainer: Trainer) -> Any:
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is None:
        raise ValueError(
            "held-out evaluation needs a datamodule: trainer.fit(module, datamodule=PromptDataModule(...))"
        )
    return datamodule

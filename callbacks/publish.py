"""Make what an evaluation in the middle of training measured known: to the loggers, and to other callbacks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.pytorch import Trainer

from lightning_modules.lean_grpo import LeanGRPO


def publish(trainer: Trainer, pl_module: LeanGRPO, values: Mapping[str, float]) -> None:
    """Log ``values`` at the iteration the policy is at, where the Trainer would count otherwise, and add them to the
    module's ``iteration_metrics``, which hold what was measured at this iteration, and to the Trainer's ``callback_metrics``."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=pl_module.iteration)
    pl_module.iteration_metrics = pl_module.iteration_metrics | dict(values)
    trainer.callback_metrics.update({name: torch.tensor(value) for name, value in values.items()})


def log_same_on_all(pl_module: LeanGRPO, values: Mapping[str, float], logger: bool = True) -> None:
    """Log values that every rank has alike, as Lightning's loops of validation and test want it: their "reduction" over the
    ranks is the largest, which is the value itself to the last bit."""
    pl_module.log_dict(values, logger=logger, batch_size=1, sync_dist=True, reduce_fx="max")

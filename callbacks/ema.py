"""Exponential moving average of the trained weights, which is what evaluation and export then use.

    theta_bar <- d theta_bar + (1 - d) theta,    d = min(decay, (1 + n) / (10 + n)) at the n-th update, n = 1, 2, ...

The ramp (TensorFlow's ``ExponentialMovingAverage``, ``num_updates``) lets the average follow quickly at the start.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn

from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.parallel.tensors import laid_out_like, swapped_in


class EMA(Callback):
    """Averages the trainable parameters (of LoRA, the adapters), in at least fp32, and saves the average with every
    checkpoint. Held-out evaluation, sample grids, ``validate``, ``test``, ``predict`` and exports use the average;
    training never does. List it before the callbacks that evaluate or export, so that they see the newest average.

    Args:
        decay: d in steady state; the average spans about ``every / (1 - decay)`` iterations.
        every: iterations from one update to the next.

    Errors: ``ValueError`` on unusable arguments, and on a checkpoint without an average, or with one of other parameters.
    """

    def __init__(self, decay: float = 0.99, every: int = 1) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay={decay}: give a number of at least 0 and below 1")
        if every < 1:
            raise ValueError(f"every={every}: give an integer of at least 1")
        self.decay, self.every = decay, every
        self.updates = 0
        """n, updates made so far."""
        self.weights: dict[str, Tensor] = {}
        """parameter's name -> its average, in at least fp32."""

    @contextmanager
    def swapped(self, pl_module: LeanGRPO) -> Iterator[None]:
        """Inside, the parameters hold the average; afterwards, also after an exception, the very tensors of before."""
        with swapped_in(_trainable(pl_module), self.weights):
            yield

    def on_fit_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        if not self.weights:
            self.weights = {name: _wide(p).clone() for name, p in _trainable(pl_module).items()}
        self._use(trainer, pl_module)

    def on_validation_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._use(trainer, pl_module)

    def on_test_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._use(trainer, pl_module)

    def on_predict_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._use(trainer, pl_module)

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if pl_module.iteration % self.every:
            return
        self.updates += 1
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
        for name, parameter in _trainable(pl_module).items():
            self.weights[name].lerp_(_wide(parameter), 1 - decay)

    def teardown(self, trainer: Trainer, pl_module: LeanGRPO, stage: str) -> None:
        pl_module.evaluation_weights = nullcontext

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "weights": dict(self.weights)}  # the strategy gathers them

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.updates, self.weights = state_dict["updates"], dict(state_dict["weights"])

    def _use(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        """From now on the module evaluates with the average (before training, without a checkpoint, there is none)."""
        parameters = _trainable(pl_module)
        if not self.weights:
            if trainer.ckpt_path is not None:
                raise ValueError(
                    f"{trainer.ckpt_path} holds no averaged weights: the run kept none; remove callbacks.ema.EMA"
                )
            return
        if {n: p.shape for n, p in parameters.items()} != {n: w.shape for n, w in self.weights.items()}:
            raise ValueError("the checkpoint's averaged weights are of other parameters: use the run's own config.yaml")
        self.weights = {name: laid_out_like(weight, parameters[name]) for name, weight in self.weights.items()}
        pl_module.evaluation_weights = lambda: self.swapped(pl_module)


def _trainable(pl_module: LeanGRPO) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in pl_module.named_parameters() if parameter.requires_grad}


def _wide(parameter: Tensor) -> Tensor:
    return parameter.detach().to(torch.promote_types(parameter.dtype, torch.float32))

"""Supervised flow matching: makes the embedded small model.

Rectified flow (Liu et al. 2022, "Flow Straight and Fast"; Lipman et al. 2022, "Flow Matching for Generative Modeling"):
``x_sigma = (1 - sigma) x_0 + sigma eps`` and the loss ``E |v(x_sigma, sigma, caption) - (eps - x_0)|^2``. Noise levels
are drawn uniformly and then shifted as the sampler shifts its grid (Esser et al. 2024, equation 23):
``sigma = s u / (1 + (s - 1) u)``, ``u`` uniform in (0, 1).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable
from torch import Tensor

from datamodules.shapes import ShapesBatch
from lightning_modules.policies.shapes import ShapesPolicy


class FlowMatching(pl.LightningModule):
    """Trains a policy's transformer and its text embedding, and writes the weights when training ends.

    Args:
        policy: what is trained.
        optimizer: makes the optimizer from the parameters.
        lr_scheduler: makes the learning-rate scheduler from the optimizer; it is stepped after every batch.
        caption_noise: share of captions in [0, 1] that swap places within the batch. The model then follows prompts
            only partly, as real base models do without guidance.
        shift: ``s`` above; more than 1 moves training towards high noise.
        weights_path: where the weights go; a relative path lies under the trainer's ``default_root_dir``.
    """

    def __init__(
        self,
        policy: ShapesPolicy,
        optimizer: OptimizerCallable = torch.optim.AdamW,
        lr_scheduler: LRSchedulerCallable | None = None,
        *,
        caption_noise: float = 0.4,
        shift: float = 3.0,
        weights_path: str = "shapes_base.safetensors",
    ) -> None:
        super().__init__()
        if not 0 <= caption_noise <= 1:
            raise ValueError(f"caption_noise {caption_noise}: give a share from 0 to 1")
        if not shift > 0:
            raise ValueError(f"shift {shift}: give a positive number, 1 for a uniform noise level")
        self.policy = policy
        self.text = policy.frozen.text.requires_grad_(True)  # a child here, so that it is trained and checkpointed
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.caption_noise = caption_noise
        self.shift = shift
        self.weights_path = weights_path

    def training_step(self, batch: ShapesBatch, batch_idx: int) -> Tensor:
        captions = shuffle_captions(batch["captions"], self.caption_noise)
        x_0 = 2 * batch["images"] - 1
        eps = torch.randn_like(x_0)
        u = torch.rand(len(x_0), device=x_0.device)
        sigma = self.shift * u / (1 + (self.shift - 1) * u)
        s = sigma.view(-1, 1, 1, 1)
        velocity = self.policy((1 - s) * x_0 + s * eps, sigma, self.policy.embed(captions))
        loss = (velocity - (eps - x_0)).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = self.optimizer(self.parameters())
        if self.lr_scheduler is None:
            return optimizer
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": self.lr_scheduler(optimizer), "interval": "step"},
        }

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.save_weights()

    def save_weights(self) -> Path:
        """Write the policy's present weights, with a note of what made them; returns the file's path."""
        path = Path(self.trainer.default_root_dir) / self.weights_path
        loss = self.trainer.callback_metrics.get("loss")
        made_by = {
            "steps": self.trainer.global_step,
            "loss": None if loss is None else round(loss.item(), 5),
            "caption_noise": self.caption_noise,
            "shift": self.shift,
        }
        self.policy.save_weights(path, made_by=made_by)
        return path


def shuffle_captions(captions: list[str], share: float) -> list[str]:
    """Draw each caption with probability ``share`` and permute the drawn ones among themselves."""
    drawn = (torch.rand(len(captions)) < share).nonzero().flatten().tolist()
    shuffled = list(captions)
    for place, source in zip(drawn, torch.randperm(len(drawn)).tolist(), strict=True):
        shuffled[place] = captions[drawn[source]]
    return shuffled

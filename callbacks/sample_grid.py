"""Pictures of what the policy draws, before, during and after training: the same prompts from the same noise."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from PIL import Image
from torch import Tensor

from callbacks.evaluation import HeldOutEvaluation
from callbacks.grid_image import Block, draw_grid
from callbacks.held_out import draw_samples, held_out_batches, undisturbed
from callbacks.lookup import first_callback
from callbacks.run_folder import replacing, run_folder
from callbacks.scoring import score
from datamodules.eval_batch import EvalLoader
from datamodules.prompts import Prompt
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.types import PromptBatch, Rows, Samples


class SampleGrid(Callback):
    """Write ``<run>/samples/iteration_<n>.png`` (n rollouts trained) and show it in TensorBoard.

    The prompts are spread evenly over the datamodule's test set, the noise is the held-out evaluation's, and so is the
    score under each image (the main reward of :class:`HeldOutEvaluation`, if the trainer has one). Training is left
    bitwise as it was.

    Args:
        every: draw after every so many iterations; 0 = only before and after training.
        prompts: how many, at most as many as the test set has.
        images: of each prompt.

    Errors: ``ValueError`` on unusable arguments, or without a test set.
    """

    def __init__(self, every: int = 0, prompts: int = 8, images: int = 4) -> None:
        for name, value, least in (("every", every, 0), ("prompts", prompts, 1), ("images", images, 1)):
            if value < least:
                raise ValueError(f"{name}={value}: give an integer of at least {least}")
        self.every, self.prompts, self.images = every, prompts, images
        self.seconds = 0.0
        """Wall-clock time spent drawing, resumed parts included."""
        self._loader: EvalLoader | None = None
        self._latest: int | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._loader = self._choose(trainer, pl_module)
        self._draw(trainer, pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        if self.every and pl_module.iteration % self.every == 0:
            self._draw(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        if self._latest != pl_module.iteration:
            self._draw(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.seconds = state_dict["seconds"]

    def _choose(self, trainer: Trainer, pl_module: LeanGRPO) -> EvalLoader:
        """The rows to draw, in batches of the test set's size."""
        batches = list(held_out_batches(trainer))
        found: dict[int, Prompt] = {}
        for batch in (batch for part in pl_module.ranks.gather(batches) for batch in part):
            for index, text, metadata in zip(batch.prompt_index.tolist(), batch.prompts, batch.metadata, strict=True):
                found.setdefault(index, Prompt(text=text, metadata=metadata))
        prompts = [found[index] for index in sorted(found)]
        count = min(self.prompts, len(prompts))
        chosen = [i * len(prompts) // count for i in range(count)]
        size, ranks = len(batches[0]), pl_module.ranks
        return EvalLoader(prompts, self.images, batch_size=size, indices=chosen, rank=ranks.rank, ranks=ranks.size)

    def _draw(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        start, self._latest = time.perf_counter(), pl_module.iteration
        when = f"the sample grid of iteration {pl_module.iteration}"
        parts = pl_module.ranks.share(lambda: self._draw_and_score(trainer, pl_module, when), when)
        if trainer.is_global_zero:
            picture = self._picture(trainer, [part for mine in parts for part in mine], pl_module.iteration)
            path = run_folder(trainer) / "samples" / f"iteration_{pl_module.iteration:06d}.png"
            with replacing(path) as temporary:
                picture.save(temporary)
            _show(trainer, picture, pl_module.iteration)
        self.seconds += time.perf_counter() - start

    def _draw_and_score(self, trainer: Trainer, pl_module: LeanGRPO, when: str) -> list[tuple[Samples, Tensor | None]]:
        """This rank's samples, each batch with its main held-out score if there is one."""
        assert self._loader is not None
        evaluation, drawn = first_callback(trainer, HeldOutEvaluation), []
        with undisturbed(pl_module):
            for samples in draw_samples(trainer, pl_module, self._loader):
                scores = None
                if evaluation is not None:
                    scores = score(evaluation.rewards[evaluation.main], samples, name=evaluation.main, when=when)
                drawn.append((samples.to("cpu"), scores))
        return drawn

    def _picture(self, trainer: Trainer, parts: list[tuple[Samples, Tensor | None]], iteration: int) -> Image.Image:
        title, scores = f"iteration {iteration}", None
        samples = Samples.joined([drawn for drawn, _ in parts])
        evaluation = first_callback(trainer, HeldOutEvaluation)
        if evaluation is not None:
            order = Rows.joined([drawn.rows for drawn, _ in parts]).order()
            scores = torch.cat([values for _, values in parts if values is not None])[order]
            title += f"  ·  {evaluation.main} {scores.mean().item():.3f} on average over these {len(scores)} images"
        blocks = [
            Block(
                caption=samples.prompts[start],
                images=samples.images[start : start + self.images],
                scores=None if scores is None else scores[start : start + self.images].tolist(),
            )
            for start in range(0, len(samples), self.images)
        ]
        return draw_grid(blocks, title)


def _show(trainer: Trainer, picture: Image.Image, iteration: int) -> None:
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_image("samples", np.asarray(picture), iteration, dataformats="HWC")

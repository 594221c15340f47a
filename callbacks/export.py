"""Exports as training goes on, so that the newest result opens in diffusers without a further step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer

from callbacks.held_out import undisturbed
from callbacks.run_folder import run_folder
from lightning_modules.lean_grpo import LeanGRPO


class Export(Callback):
    """Write ``<run>/export/iteration_<n>/`` (n rollouts trained) when training ends, and every so many iterations: LoRA in
    diffusers' format or the whole transformer, with the weights that evaluation uses, checked after writing.

    Args:
        every: export after every so many iterations; 0 = only when training ends.

    Errors: ``ValueError`` on a negative ``every``; ``RuntimeError`` if an export fails its check.
    """

    def __init__(self, every: int = 0) -> None:
        if every < 0:
            raise ValueError(f"every={every}: give an integer of at least 0")
        self.every = every
        self._latest: int | None = None

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.every and pl_module.iteration % self.every == 0:
            self._export(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        if self._latest != pl_module.iteration:
            self._export(trainer, pl_module)
        folder = self._folder(trainer, pl_module)
        print(f"exported to {folder}; open it with\n  {pl_module.how_to_open(folder)}", flush=True)

    def _export(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        with undisturbed(pl_module):
            pl_module.export(self._folder(trainer, pl_module))
        self._latest = pl_module.iteration

    @staticmethod
    def _folder(trainer: Trainer, pl_module: LeanGRPO) -> Path:
        return run_folder(trainer) / "export" / f"iteration_{pl_module.iteration:06d}"

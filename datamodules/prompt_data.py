"""The datamodule for prompt files: training iterations by (seed, iteration), evaluation by rows.

Training is one pass: the run of ``iterations`` steps is one epoch of the Trainer (``max_epochs: 1``). The stream starts
at the LightningModule's ``iteration`` counter, which a checkpoint restores before the loader is asked for. Lightning
counts the k batches of the interrupted epoch as done and asks for the rest; the loader deals iterations k .. n-1 and
says that its length is n, so the run neither stops early nor repeats nor skips an iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from datamodules.eval_batch import EvalLoader
from datamodules.prompt_loader import PromptLoader, ResumablePromptLoader
from datamodules.prompts import Prompt, load_prompts
from datamodules.sampler import PromptSampler


class PromptDataModule(L.LightningDataModule):
    """Prompts from files. Training batches are ``PromptBatch``, evaluation batches ``EvalBatch``. Every rank gets
    all training batches, and its share of the evaluation rows.

    Paths are absolute, relative to the working directory, or relative to the repository, in this order.

    Args:
        train: prompt file (``.txt`` or ``.jsonl``) to train on.
        prompts_per_step: prompts of one iteration, B.
        iterations: iterations of the whole run, a resumed part included.
        val: file for validation; None = no validation during ``fit``.
        test: file for ``test``.
        predict: file for ``predict``.
        seed: keys the order of the training prompts.
        num_workers: worker processes that look training prompts up; 0 is fastest for text.
        images_per_prompt: images of each prompt in val, test and predict.
        eval_batch_size: rows (images) per batch in val, test and predict.
        max_val_prompts: validate on this many prompts, spread evenly over the file; None = all.
    """

    def __init__(
        self,
        train: str,
        prompts_per_step: int,
        iterations: int,
        val: str | None = None,
        test: str | None = None,
        predict: str | None = None,
        seed: int = 0,
        num_workers: int = 0,
        images_per_prompt: int = 4,
        eval_batch_size: int = 32,
        max_val_prompts: int | None = None,
    ) -> None:
        super().__init__()
        for name, value, least in (
            ("prompts_per_step", prompts_per_step, 1),
            ("iterations", iterations, 1),
            ("num_workers", num_workers, 0),
            ("images_per_prompt", images_per_prompt, 1),
            ("eval_batch_size", eval_batch_size, 1),
            ("max_val_prompts", 1 if max_val_prompts is None else max_val_prompts, 1),
        ):
            if value < least:
                raise ValueError(f"{name}={value}: give an integer of at least {least}")
        self.files = {"train": train, "val": val, "test": test, "predict": predict}
        self.prompts_per_step = prompts_per_step
        self.iterations = iterations
        self.seed = seed
        self.num_workers = num_workers
        self.images_per_prompt = images_per_prompt
        self.eval_batch_size = eval_batch_size
        self.max_val_prompts = max_val_prompts
        self._prompts: dict[str, list[Prompt]] = {}

    def setup(self, stage: str) -> None:
        """Read the files of a stage, so that a bad one stops the run before any model is loaded onto a device."""
        needed = {"fit": ["train"], "validate": ["val"], "test": ["test"], "predict": ["predict"]}[stage]
        if stage == "fit" and self.files["val"] is not None:
            needed.append("val")
        for split in needed:
            self.prompts(split)

    def prompts(self, split: str) -> list[Prompt]:
        """All prompts of the file of "train", "val", "test" or "predict", read once. ``ValueError`` without a file."""
        if split not in self._prompts:
            file = self.files[split]
            if file is None:
                raise ValueError(f"no prompt file for {split!r}: set data.init_args.{split} to a .txt or .jsonl file")
            self._prompts[split] = load_prompts(file)
        return self._prompts[split]

    def train_dataloader(self) -> PromptLoader:
        """Batches of the iterations that are still to do."""
        self._refuse_second_pass()
        prompts, position = self.prompts("train"), self._counter()
        start = 0 if position is None else position()
        sampler = PromptSampler(len(prompts), self.prompts_per_step, self.iterations, self.seed, start)
        if position is None:
            return PromptLoader(prompts, sampler, self.num_workers)
        return ResumablePromptLoader(prompts, sampler, position, self.num_workers)

    def val_dataloader(self) -> EvalLoader:
        """Validation rows; none where ``val`` is None, so that ``fit`` runs without validation."""
        prompts = [] if self.files["val"] is None else self.prompts("val")
        count = min(len(prompts), self.max_val_prompts or len(prompts))
        return self._eval_loader(prompts, [i * len(prompts) // count for i in range(count)])

    def test_dataloader(self) -> EvalLoader:
        return self._eval_loader(self.prompts("test"))

    def predict_dataloader(self) -> EvalLoader:
        return self._eval_loader(self.prompts("predict"))

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Unchanged: text and ids stay on the CPU."""
        return batch

    def _eval_loader(self, prompts: list[Prompt], indices: list[int] | None = None) -> EvalLoader:
        rank, ranks = (0, 1) if self.trainer is None else (self.trainer.global_rank, self.trainer.world_size)
        return EvalLoader(prompts, self.images_per_prompt, self.eval_batch_size, indices, rank=rank, ranks=ranks)

    def _counter(self) -> Callable[[], int] | None:
        """The trained module's ``iteration``, or None where nothing counts (no Trainer, or a module without one)."""
        module: Any = None if self.trainer is None else self.trainer.lightning_module
        return (lambda: int(module.iteration)) if hasattr(module, "iteration") else None

    def _refuse_second_pass(self) -> None:
        trainer = self.trainer
        if trainer is None or trainer.max_epochs is None or trainer.max_epochs - trainer.current_epoch <= 1:
            return
        raise ValueError(
            f"trainer.max_epochs={trainer.max_epochs}: one epoch is the whole run; set trainer.max_epochs to "
            f"{trainer.current_epoch + 1} and the length of the run by data.init_args.iterations={self.iterations}"
        )

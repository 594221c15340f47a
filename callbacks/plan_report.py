"""Before anything is sampled or trained: what the run will do and how much memory its tensors will take."""

from __future__ import annotations

from lightning.pytorch import Callback, Trainer

from callbacks.run_folder import run_folder, write_json
from datamodules.prompt_data import PromptDataModule
from lightning_modules.lean_grpo import LeanGRPO

FILE = "plan.json"


class PlanReport(Callback):
    """When ``fit`` starts, print the plan of its iterations and write it to ``<run>/plan.json``.

    Errors: ``ValueError`` if the prompts do not come from a ``PromptDataModule``.
    """

    def on_fit_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        data = trainer.datamodule  # pyright: ignore[reportAttributeAccessIssue]  (set by fit)
        if not isinstance(data, PromptDataModule):
            raise ValueError(
                f"PlanReport reads the prompts of a PromptDataModule, not of {type(data).__name__}: remove it"
            )
        if not trainer.is_global_zero:
            return
        texts = [prompt.text for prompt in data.prompts("train")]
        plan = pl_module.plan(
            (texts * data.prompts_per_step)[: data.prompts_per_step],
            ranks=trainer.world_size,
            autocast=trainer.precision_plugin.forward_context,
        )
        write_json(run_folder(trainer) / FILE, plan.as_dict())
        print(f"\n{plan}\n", flush=True)

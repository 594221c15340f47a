"""Fixtures of a whole run in miniature: two iterations in a fraction of a second."""

import json

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from datamodules.prompt_data import PromptDataModule
from tests.callbacks.miniature import PROMPTS


@pytest.fixture
def make_data(tmp_path):
    def make(prompts=PROMPTS, **changes):
        file = tmp_path / "prompts.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in prompts), encoding="utf-8")
        settings = {
            "train": str(file), "test": str(file), "val": str(file), "predict": str(file), "prompts_per_step": 2,
            "iterations": 2, "images_per_prompt": 2, "eval_batch_size": 5,
        }  # fmt: skip
        return PromptDataModule(**(settings | changes))

    return make


@pytest.fixture
def make_trainer(tmp_path):
    def make(*callbacks, **changes):
        settings = {
            "default_root_dir": tmp_path, "logger": CSVLogger(tmp_path, name="", version="run"), "accelerator": "cpu",
            "devices": 1, "max_epochs": 1, "enable_checkpointing": False, "enable_progress_bar": False,
            "enable_model_summary": False, "limit_val_batches": 0,
        }  # fmt: skip
        return Trainer(callbacks=list(callbacks), **(settings | changes))

    return make

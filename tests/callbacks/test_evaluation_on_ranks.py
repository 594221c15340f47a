"""A reward that fails on one rank alone ends them all: under FSDP2 the others would wait for its layers."""

from pathlib import Path

import pytest
from lightning.pytorch import Trainer

from callbacks.evaluation import HeldOutEvaluation
from datamodules.prompt_data import PromptDataModule
from tests.callbacks.test_benchmark_on_ranks import TEXTS, Brightness, prepared
from tests.loop import Scorer
from tests.rank_runs import STRATEGIES, Case, make_module
from tests.ranks import RankError, pool


def run(root, stage):
    file = str(Path(root) / "prompts.jsonl")
    trainer = Trainer(
        callbacks=[Scorer(), HeldOutEvaluation({"r": Brightness(TEXTS[0])}, "r")], strategy=STRATEGIES["fsdp2"](),
        devices=2, accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, use_distributed_sampler=False, default_root_dir=root,
    )  # fmt: skip
    data = PromptDataModule(
        train=file, val=file, test=file, prompts_per_step=2, iterations=1, images_per_prompt=1, eval_batch_size=1
    )
    getattr(trainer, stage)(make_module(Case(policy="shapes", strategy="fsdp2", ranks=2)), datamodule=data)


@pytest.mark.parametrize("stage", ["fit", "validate"])
def test_a_failure_on_one_rank_ends_all(tmp_path, stage):
    with pytest.raises(RankError) as failure:
        pool(2).run(run, prepared(tmp_path / "x"), stage, timeout=25)
    assert "reward 'r' failed in " in str(failure.value) and "on prompt 'a red circle'" in str(failure.value)
    assert "stuck" not in str(failure.value)

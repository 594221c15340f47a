"""A process that is killed outright, in the middle of a run or of a save, leaves a checkpoint that one process resumes."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from callbacks.checkpoint import IterationCheckpoint
from callbacks.checkpoint_io import AtomicCheckpointIO
from tests.command_line import schedule, write
from tests.ranks import RankError, pool
from train import main

STRATEGIES = {
    "ddp": ["ddp"],
    "fsdp2": ["fsdp2"],
    "sharded": ["lightning_modules.strategies.FSDP2Strategy", "--trainer.strategy.sharded_checkpoints=true"],
}


def fit(path, strategy, *options):
    """The command line on this rank."""
    IterationCheckpoint.grace = 3.0  # of a process of the pool
    with contextlib.redirect_stdout(sys.stderr):
        main(["fit", "--config", path, "--trainer.devices=2", "--trainer.strategy", *STRATEGIES[strategy], *options])


class KilledInTheMiddle(Callback):
    """One rank's process ends without a word, after its rollout of iteration 3."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def on_rollout_end(self, trainer, pl_module, samples, scores):
        if trainer.global_rank == self.rank and pl_module.iteration == 3:
            os.kill(os.getpid(), signal.SIGKILL)


def fit_killed_while_saving(path, strategy, rank):
    """``fit`` on a rank that, in its turn, dies when half of the second checkpoint is written."""
    torch_save = torch.save

    def save(content, file, *arguments, **options):
        if torch.distributed.get_rank() == rank and checkpoints_in(Path(path).parent / "runs/version_0/checkpoints"):
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        torch_save(content, file, *arguments, **options)

    torch.save = save
    try:
        fit(path, strategy)
    finally:
        torch.save = torch_save


def checkpoints_in(folder):
    return sorted(path.name for path in folder.glob("iteration_*.ckpt"))


def last_is_usable(tmp_path, iteration):
    """Read, and resumed by one process."""
    last = tmp_path / "runs/version_0/checkpoints/last.ckpt"
    assert AtomicCheckpointIO().load_checkpoint(last)["lean_grpo"]["iteration"] == iteration
    cli = main(["fit", "--config", write(tmp_path / "rest", iterations=iteration + 1), "--ckpt_path", str(last)])
    assert cli.model.iteration == iteration + 1


@pytest.mark.parametrize(
    ("strategy", "rank"), [("ddp", 1), ("fsdp2", 0), ("sharded", 1), pytest.param("ddp", 0, marks=pytest.mark.slow)]
)
def test_killed_in_the_middle_of_a_run(strategy, rank, tmp_path):
    killer = {"class_path": f"{__name__}.KilledInTheMiddle", "init_args": {"rank": rank}}
    path, start = write(tmp_path, callbacks=[killer], schedule=schedule("Reweight")), time.monotonic()
    with pytest.raises(RankError, match=rf"rank {rank}:\ndied \(exit code -9\)"):
        pool(2).run(fit, path, strategy, "--model.init_args.rank_timeout=5")
    assert time.monotonic() - start < 60
    folder = tmp_path / "runs/version_0/checkpoints"
    saved_alone = strategy == "ddp" and rank == 1  # the first rank has all of it, up to the last complete iteration
    assert checkpoints_in(folder) == ["iteration_000002.ckpt", *["iteration_000003.ckpt"] * saved_alone]
    last_is_usable(tmp_path, 3 if saved_alone else 2)


@pytest.mark.parametrize(("strategy", "rank"), [("fsdp2", 0), ("sharded", 1)])
def test_killed_in_the_middle_of_a_save(strategy, rank, tmp_path):
    path = write(tmp_path)
    with pytest.raises(RankError, match=rf"rank {rank}:\ndied \(exit code -9\)"):
        pool(2).run(fit_killed_while_saving, path, strategy, rank)
    assert checkpoints_in(tmp_path / "runs/version_0/checkpoints") == ["iteration_000002.ckpt"]
    last_is_usable(tmp_path, 2)

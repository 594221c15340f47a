"""The command line on several processes: one run folder, and what is left when a process is killed."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from callbacks.checkpoint import IterationCheckpoint
from callbacks.checkpoint_io import AtomicCheckpointIO
from tests.command_line import load, rows, run_of, schedule, write
from tests.ranks import RankError, pool
from train import main

STRATEGIES = {
    "ddp": ["ddp"],
    "fsdp2": ["fsdp2"],
    "sharded": ["lightning_modules.strategies.FSDP2Strategy", "--trainer.strategy.sharded_checkpoints=true"],
}


def command(path, strategy="ddp", *options):
    return ["fit", "--config", path, "--trainer.devices=2", "--trainer.strategy", *STRATEGIES[strategy], *options]


def fit(path, strategy, *options):
    """On this rank -> (its idea of the run folder, iterations done)."""
    IterationCheckpoint.grace = 3.0  # of a process of the pool
    with contextlib.redirect_stdout(sys.stderr):
        cli = main(command(path, strategy, *options))
    return run_of(cli), cli.model.iteration


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_all_ranks_share_one_folder_that_the_first_one_fills(strategy, tmp_path):
    path = write(tmp_path)
    for version in (0, 1):
        results = pool(2).run(fit, path, strategy)
        run = tmp_path / "runs" / f"version_{version}"
        assert results == [(run, 4)] * 2
        files = sorted(file.name for file in run.iterdir() if not file.name.startswith("events"))
        assert files == ["checkpoints", "config.yaml", "hparams.yaml", "metrics.csv"]
        assert len(list(run.glob("events*"))) == 1
        assert list(rows(run)) == [1, 2, 3, 4]
    assert len(list((tmp_path / "runs").iterdir())) == 2


def test_a_run_of_two_processes_logs_what_one_logs_and_is_resumed_by_one(tmp_path):
    """The command line's own path, to the same numbers and across process counts."""
    two, one = tmp_path / "two", tmp_path / "one"
    pool(2).run(fit, write(two), "ddp")
    whole = run_of(main(["fit", "--config", write(one)]))
    ours, theirs = rows(two / "runs/version_0"), rows(whole)
    for iteration, row in theirs.items():
        for name in ("reward", "grad_norm", "lr"):
            assert float(ours[iteration][name]) == pytest.approx(float(row[name]), rel=1e-4), name
    last = two / "runs/version_0/checkpoints/last.ckpt"
    cli = main(["fit", "--config", write(one, iterations=6), "--ckpt_path", str(last)])
    assert list(rows(run_of(cli))) == [5, 6]


def test_a_root_that_cannot_hold_a_run_stops_every_rank(tmp_path):
    path = write(tmp_path)
    root = f"--trainer.default_root_dir={tmp_path / 'prompts.txt'}"
    with pytest.raises(RankError) as caught:
        pool(2).run(fit, path, "ddp", root)
    assert len(re.findall(r"ValueError: trainer\.default_root_dir=.*a folder that can be written", str(caught.value))) == 2


def test_an_unproven_strategy_is_refused_before_a_process_is_started(tmp_path):
    options = ["--trainer.devices=2", "--trainer.strategy=ddp_spawn"]
    with pytest.raises(ValueError, match="ddp started by 'spawn' is not proven"):
        main(["fit", "--config", write(tmp_path), *options])
    assert not (tmp_path / "runs").exists()


# a process that is killed


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
        return fit(path, strategy)
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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("strategy", STRATEGIES)
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


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 0), ("fsdp2", 0), ("sharded", 0), ("sharded", 1)])
def test_killed_in_the_middle_of_a_save(strategy, rank, tmp_path):
    path = write(tmp_path)
    with pytest.raises(RankError, match=rf"rank {rank}:\ndied \(exit code -9\)"):
        pool(2).run(fit_killed_while_saving, path, strategy, rank)
    assert checkpoints_in(tmp_path / "runs/version_0/checkpoints") == ["iteration_000002.ckpt"]
    last_is_usable(tmp_path, 2)


# real processes, started by Lightning


@pytest.mark.slow  # pytest -m slow tests/test_launching.py
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 1)])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_signal_to_the_first_process_ends_all_with_a_checkpoint(strategy, number, status, tmp_path, repository):
    arguments = command(write(tmp_path, iterations=100_000), strategy)
    process = subprocess.Popen(
        [sys.executable, "train.py", *arguments],
        cwd=repository,
        env=os.environ | {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    run = tmp_path / "runs" / "version_0"
    try:
        deadline = time.monotonic() + 250
        while not ((run / "checkpoints/last.ckpt").exists() and len(rows(run)) >= 3):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        process.send_signal(number)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == status, out
    iteration = load(run / "checkpoints" / "last.ckpt")["lean_grpo"]["iteration"]
    assert f"broken off after iteration {iteration}" in out
    assert max(rows(run)) == iteration
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["version_0"]

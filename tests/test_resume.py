"""Stopped and resumed is the same as never stopped, bit for bit on the CPU.

The reward draws from every global generator, so a random state that is off by one draw shows in the next gradient.
"""

import functools
import random
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, Trainer, seed_everything

from callbacks.checkpoint import IterationCheckpoint
from callbacks.checkpoint_io import AtomicCheckpointIO
from datamodules.prompt_data import PromptDataModule
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from tests.command_line import PROMPTS, load, rows, run_of, write
from tests.loop import module, smooth_reward
from train import main

SCHEDULES = {
    "native": lambda: Native(),
    "native twice": lambda: Native(updates_per_rollout=2),
    "retain": lambda: Retain(),
    "per sample": lambda: Reweight("per_sample"),
    "streaming": lambda: Reweight("streaming"),
}
N = 5


class NoisyScorer(Callback):
    """Scores with a share of chance, keeps (iteration, prompt, score) of all, and fails in the middle of one iteration."""

    def __init__(self, fail_at=None):
        self.seen, self.fail_at = [], fail_at

    def on_rollout_end(self, trainer, pl_module, samples, scores):
        chance = 0.01 * (torch.rand(len(samples)).double() + random.random() + np.random.rand())
        values = smooth_reward(samples.images) + chance
        if pl_module.iteration == self.fail_at and samples.rows.prompt.max() == 2:
            raise RuntimeError("the reward failed")
        scores.values["noisy"] = values
        self.seen += [(pl_module.iteration, p, v) for p, v in zip(samples.prompts, values.tolist(), strict=True)]


def run(root, iterations, schedule="retain", *, ckpt_path=None, fail_at=None, workers=0, beta=0.0):
    """One session -> (what was scored, the checkpoint of its end or of its failure)."""
    seed_everything(3, verbose=False)
    root.mkdir(parents=True, exist_ok=True)
    (root / "prompts.txt").write_text("\n".join(PROMPTS))
    model = module(
        SCHEDULES[schedule](),
        micro_batch=2,
        beta=beta,
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=10),
    )
    scorer = NoisyScorer(fail_at)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=root, callbacks=[scorer, IterationCheckpoint(every=2, keep=9)], plugins=[AtomicCheckpointIO()],
    )  # fmt: skip
    data = PromptDataModule(str(root / "prompts.txt"), prompts_per_step=3, iterations=iterations, num_workers=workers)
    try:
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    except RuntimeError:
        assert fail_at is not None
    return scorer.seen, load(root / "checkpoints" / "last.ckpt")


def checkpoint(root, iteration):
    return root / "checkpoints" / f"iteration_{iteration:06d}.ckpt"


def assert_identical(ours, theirs, path="checkpoint"):
    """Two nests of dicts, lists, tensors and plain values are equal in every bit."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, dict):
        assert ours.keys() == theirs.keys(), path
        for key in ours:
            assert_identical(ours[key], theirs[key], f"{path}[{key!r}]")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), path
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            assert_identical(*pair, f"{path}[{index}]")
    elif isinstance(ours, torch.Tensor):
        assert ours.dtype == theirs.dtype, path
        assert torch.equal(ours, theirs), path
    else:
        assert ours == theirs, path


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """schedule -> folder, scores and final checkpoint of the run that was never stopped."""

    @functools.cache
    def run_once(schedule, **options):
        root = tmp_path_factory.mktemp("whole")
        return root, *run(root, N, schedule, **options)

    return run_once


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_from_a_periodic_checkpoint_in_the_middle(schedule, whole, tmp_path):
    root, scores, end = whole(schedule)
    rest, resumed_end = run(tmp_path, N, schedule, ckpt_path=checkpoint(root, 2))
    assert rest == [row for row in scores if row[0] >= 2]
    assert_identical(resumed_end, end)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_from_the_checkpoint_of_a_failure(schedule, whole, tmp_path):
    _, scores, end = whole(schedule)
    first, broken = run(tmp_path / "first", N, schedule, fail_at=3)
    assert broken["lean_grpo"]["iteration"] == 3
    rest, resumed_end = run(tmp_path / "rest", N, schedule, ckpt_path=checkpoint(tmp_path / "first", 3))
    assert [row for row in first if row[0] < 3] + rest == scores
    assert_identical(resumed_end, end)


@pytest.mark.parametrize("at", [1, 4])
def test_after_the_first_and_before_the_last_iteration(at, whole, tmp_path):
    _, scores, end = whole("retain")
    run(tmp_path / "first", N, fail_at=at)
    rest, resumed_end = run(tmp_path / "rest", N, ckpt_path=checkpoint(tmp_path / "first", at))
    assert rest == [row for row in scores if row[0] >= at]
    assert_identical(resumed_end, end)


def test_twice_in_a_row(whole, tmp_path):
    _, _, end = whole("retain")
    run(tmp_path / "a", N, fail_at=2)
    run(tmp_path / "b", N, fail_at=3, ckpt_path=checkpoint(tmp_path / "a", 2))
    _, resumed_end = run(tmp_path / "c", N, ckpt_path=checkpoint(tmp_path / "b", 3))
    assert_identical(resumed_end, end)


def test_with_a_reference_policy(whole, tmp_path):
    """The anchor of the KL term is the policy that training began with, not the one that was resumed."""
    root, _, end = whole("retain", beta=0.1)
    _, resumed_end = run(tmp_path, N, beta=0.1, ckpt_path=checkpoint(root, 2))
    assert_identical(resumed_end, end)
    assert end["lean_grpo"]["reference"] is not None


def test_with_worker_processes(whole, tmp_path):
    """Workers draw a seed from the global generator when they start; the run does not notice."""
    root, scores, end = whole("retain")
    rest, resumed_end = run(tmp_path, N, workers=2, ckpt_path=checkpoint(root, 2))
    assert rest == [row for row in scores if row[0] >= 2]
    assert_identical(resumed_end, end)


def test_a_shorter_finished_run_is_extended(whole, tmp_path):
    _, scores, end = whole("retain")
    for short in (2, 3):  # with and without a periodic checkpoint at its end
        first, _ = run(tmp_path / f"first_{short}", short)
        ckpt_path = tmp_path / f"first_{short}" / "checkpoints" / "last.ckpt"
        rest, extended_end = run(tmp_path / f"rest_{short}", N, ckpt_path=ckpt_path)
        assert first + rest == scores
        assert_identical(extended_end, end)


def test_a_finished_run_resumed_as_it_is_trains_no_further(whole, tmp_path):
    root, _, end = whole("retain")
    last = root / "checkpoints" / "last.ckpt"
    seed_everything(3, verbose=False)
    model = module(Retain(), micro_batch=2)
    trainer = Trainer(
        accelerator="cpu", devices=1, max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, default_root_dir=tmp_path, callbacks=[scorer := NoisyScorer()],
    )  # fmt: skip
    data = PromptDataModule(str(root / "prompts.txt"), prompts_per_step=3, iterations=N)
    trainer.fit(model, datamodule=data, ckpt_path=last)
    assert scorer.seen == []
    assert model.iteration == N
    assert all(torch.equal(end["state_dict"][k], v) for k, v in model.state_dict().items())


def test_the_metrics_of_a_resumed_command_line_are_those_of_the_whole_run(tmp_path):
    whole = run_of(main(["fit", "--config", write(tmp_path, iterations=4)]))
    ckpt_path = str(checkpoint(whole, 2))
    rest = run_of(main(["fit", "--config", str(whole / "config.yaml"), "--ckpt_path", ckpt_path]))
    expected = {iteration: row for iteration, row in rows(whole).items() if iteration > 2}
    assert rows(rest) == expected
    assert len(expected) == 2


# a real process, really interrupted


@pytest.fixture(scope="module")
def processes(tmp_path_factory, repository):
    """(process, its root) twice, started together to share the wait: one to be interrupted, one to be killed."""
    started = []
    for name in ("interrupted", "killed"):
        root = tmp_path_factory.mktemp(name)
        command = [sys.executable, "train.py", "fit", "--config", write(root, iterations=100_000)]
        process = subprocess.Popen(
            command,
            cwd=repository,
            env={"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background job ignores it
        )
        started.append((process, root))
    yield started
    for process, _ in started:
        process.kill()
        process.communicate()


def wait_for(run: Path, process, iterations: int, seconds: float = 200.0) -> None:
    """Until ``iterations`` are logged and a periodic checkpoint is written."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if (run / "checkpoints" / "last.ckpt").exists() and len(rows(run)) >= iterations:
            return
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)
    raise TimeoutError(f"{run}: no {iterations} iterations within {seconds} s")


@pytest.mark.timeout(300)  # seconds on a quiet machine, most of them imports
def test_control_c_leaves_a_checkpoint_that_its_own_command_resumes(processes):
    process, root = processes[0]
    run = root / "runs" / "version_0"
    wait_for(run, process, 3)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode not in (0, -signal.SIGINT), out
    assert "KeyboardInterrupt" in out
    iteration = load(run / "checkpoints" / "last.ckpt")["lean_grpo"]["iteration"]
    assert f"broken off after iteration {iteration}" in out
    command = next(line for line in out.splitlines() if line.strip().startswith("python train.py fit"))
    cli = main([*shlex.split(command)[2:], f"--data.init_args.iterations={iteration + 2}"])
    assert cli.model.iteration == iteration + 2
    assert list(rows(run_of(cli))) == [iteration + 1, iteration + 2]


@pytest.mark.timeout(300)
def test_a_kill_leaves_the_last_periodic_checkpoint(processes):
    process, root = processes[1]
    run = root / "runs" / "version_0"
    wait_for(run, process, 3)
    process.kill()
    process.communicate(timeout=60)
    last = run / "checkpoints" / "last.ckpt"
    iteration = load(last)["lean_grpo"]["iteration"]
    assert iteration % 2 == 0
    options = ["--ckpt_path", str(last), f"--data.init_args.iterations={iteration + 1}"]
    assert main(["fit", "--config", str(run / "config.yaml"), *options]).model.iteration == iteration + 1

"""Command lines on several processes: one run folder whoever launches them, and what a signal to one or all of them leaves.

What starts processes of its own takes a minute each: ``pytest -m slow tests/test_rank_launch.py``.
"""

import contextlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.command_line import load, rows, write
from tests.ranks import pool
from train import main

SPLITS = ("val", "test", "predict")
DDP = ("--trainer.devices=2", "--trainer.strategy=ddp")
FSDP2 = ("--trainer.devices=2", "--trainer.strategy=fsdp2")
SLURM = {
    "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1",
    "SLURM_NODEID": "0", "SLURM_NODELIST": "localhost",
}  # fmt: skip


def command(args, environment=None):
    """A command line on this rank -> (the Trainer's folder, its loggers' folders, what was printed)."""
    rank = os.environ["RANK"]
    said, before = io.StringIO(), dict(os.environ)
    if environment is not None:
        os.environ.update(environment | {"SLURM_PROCID": rank, "SLURM_LOCALID": rank})
    try:
        with contextlib.redirect_stdout(said):
            cli = main(list(args))
    finally:
        os.environ.clear()
        os.environ.update(before)
    folders = {os.path.normpath(logger.log_dir) for logger in cli.trainer.loggers}
    return cli.trainer.default_root_dir, folders, said.getvalue()


def figures(run):
    """Rewards and gradient norms of every iteration."""
    return [float(row[name]) for row in rows(run).values() for name in ("reward", "grad_norm")]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Figures of the run in one process."""
    root = tmp_path_factory.mktemp("alone")
    return figures(Path(main(["fit", "--config", write(root)]).trainer.default_root_dir))


@pytest.mark.parametrize(
    ("options", "environment"), [(DDP, None), (FSDP2, None), (DDP, SLURM)], ids=["ddp", "fsdp2", "slurm"]
)
def test_all_ranks_write_to_the_first_ones_folder(options, environment, alone, tmp_path):
    summary = [{"class_path": "callbacks.summary.Summary"}, {"class_path": "callbacks.plan_report.PlanReport"}]
    config = write(tmp_path, callbacks=summary if options == DDP else summary[:1])
    results = pool(2).run(command, ["fit", "--config", config, *options], environment)
    run = tmp_path / "runs" / "version_0"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["version_0"]
    for folder, loggers, _ in results:
        assert (Path(folder), loggers) == (run, {str(run)})
    assert results[0][2].count(f"run folder: {run}") == 1
    assert results[1][2] == ""
    assert figures(run) == pytest.approx(alone, rel=1e-4)
    assert list(rows(run)) == [1, 2, 3, 4]
    assert len(list(run.glob("events.out.tfevents.*"))) == 1
    assert {"config.yaml", "summary.json", "metrics.csv", "checkpoints"} <= {path.name for path in run.iterdir()}
    assert not list(run.rglob(".*"))  # nothing half-written


@pytest.mark.parametrize("options", [DDP, FSDP2], ids=["ddp", "fsdp2"])
def test_predict_writes_every_image_once(options, tmp_path):
    writer = {"class_path": "callbacks.predict_writer.PredictWriter", "init_args": {"rewards": None}}
    config = write(tmp_path, callbacks=[writer], data=dict.fromkeys(SPLITS, str(tmp_path / "prompts.txt")))
    with open(tmp_path / "prompts.txt", "a") as file:
        file.write("a fifth prompt\n")
    results = pool(2).run(command, ["predict", "--config", config, *options, "--data.init_args.images_per_prompt=1"])
    folder = tmp_path / "runs" / "version_0" / "predictions"
    assert sorted(path.name for path in folder.glob("*.png")) == [f"{k:05d}_0.png" for k in range(5)]
    assert len((folder / "predictions.jsonl").read_text().splitlines()) == 5
    assert f"5 images in {folder}" in results[0][2]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["version_0"]


def refused(args):
    try:
        command(args)
    except ValueError as error:
        return str(error)
    return None


def test_a_root_that_cannot_hold_a_run_stops_every_rank(tmp_path):
    args = ["fit", "--config", write(tmp_path), *DDP, f"--trainer.default_root_dir={tmp_path / 'prompts.txt'}"]
    for message in pool(2).run(refused, args):
        assert "give a folder that can be written" in message


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        ("ddp_spawn", "'spawn' is not proven"),
        ("ddp_notebook", "'fork' is not proven"),
        ('{"class_path": "lightning.pytorch.strategies.ModelParallelStrategy"}', "frozen weights"),
    ],
)
def test_a_strategy_that_is_not_proven_is_refused_before_any_process_is_started(strategy, reason, tmp_path):
    options = [f"--trainer.strategy={strategy}", "--trainer.devices=2"]
    with pytest.raises(ValueError, match=reason):
        main(["fit", "--config", write(tmp_path), *options])
    assert not (tmp_path / "runs").exists()


# processes of their own


class Job:
    """A command line started as a user would, in a session of its own."""

    def __init__(self, repository, root, options, *, torchrun=False, **config):
        self.run = root / "runs" / "version_0"
        start = [sys.executable]
        if torchrun:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
            start += ["-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={port}"]
        mark = {"LAUNCHED_BY": str(root)}
        self._mark = f"LAUNCHED_BY={root}"
        self._log = open(root / "log", "w+")  # noqa: SIM115  (closed with the job)
        self.process = subprocess.Popen(
            [*start, "train.py", "fit", "--config", write(root, **config), *options],
            cwd=repository,
            env={"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"]} | mark,
            stdout=self._log, stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )  # fmt: skip

    @property
    def said(self):
        self._log.seek(0)
        return self._log.read()

    def wait_for(self, file, iterations=0, seconds=240.0):
        deadline = time.monotonic() + seconds
        while not file.exists() or (iterations and len(rows(self.run)) < iterations):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, self.said
            time.sleep(0.05)

    def running(self, iterations=3):
        self.wait_for(self.run / "checkpoints" / "last.ckpt", iterations)

    def pids(self):
        """rank -> process id, of processes that run the command line (torchrun's have sessions of their own)."""
        found = {}
        for process in filter(lambda path: path.name.isdigit(), Path("/proc").iterdir()):
            with contextlib.suppress(OSError):
                variables = (process / "environ").read_text().split("\0")
                words = (process / "cmdline").read_text().split("\0")
                if self._mark in variables and "torch.distributed.run" not in words:
                    rank = next((v for v in variables if v.startswith("LOCAL_RANK=")), "LOCAL_RANK=0")
                    found[int(rank.partition("=")[2])] = int(process.name)
        return found

    def ended(self, seconds):
        """(exit status, what was said), all processes gone."""
        status = self.process.wait(timeout=seconds)
        deadline = time.monotonic() + 20
        while self.pids():
            assert time.monotonic() < deadline, self.pids()
            time.sleep(0.1)
        return status, self.said

    def close(self):
        self.process.kill()
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self._log.close()


@pytest.fixture
def job(repository, tmp_path):
    jobs = []

    def start(options, **settings):
        jobs.append(Job(repository, tmp_path, options, **settings))
        return jobs[-1]

    yield start
    for one in jobs:
        one.close()


def resumes(run, tmp_path):
    """The newest checkpoint's iteration, after a resume in one process has done one more."""
    last = run / "checkpoints" / "last.ckpt"
    iteration = load(last)["lean_grpo"]["iteration"]
    options = ["--ckpt_path", str(last), f"--data.init_args.iterations={iteration + 1}", "--trainer.devices=1",
               "--trainer.strategy=auto", "--trainer.plugins=null"]  # fmt: skip
    cli = main(["fit", "--config", str(run / "config.yaml"), *options])
    assert cli.model.iteration == iteration + 1
    shutil.rmtree(cli.trainer.default_root_dir)
    return iteration


LAUNCHES = [
    pytest.param(DDP, False, id="lightning ddp"),
    pytest.param(FSDP2, False, id="lightning fsdp2"),
    pytest.param(DDP, True, id="torchrun ddp"),
    pytest.param(FSDP2, True, id="torchrun fsdp2"),
]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("options", "torchrun"), LAUNCHES)
def test_launched_as_a_user_would(options, torchrun, job, alone, tmp_path):
    status, said = (started := job(options, torchrun=torchrun)).ended(seconds=300)
    assert status == 0, said
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["version_0"]
    assert figures(started.run) == pytest.approx(alone, rel=1e-4)
    assert said.count("run folder: ") == 1


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("options", "torchrun"), LAUNCHES)
def test_killing_one_rank_ends_the_others_and_leaves_a_checkpoint(options, torchrun, rank, job, tmp_path):
    started = job(options, torchrun=torchrun, iterations=100_000)
    started.running()
    os.kill(started.pids()[rank], signal.SIGKILL)
    status, said = started.ended(seconds=90)
    assert status != 0
    assert "rank" in said and ("arrived" in said or "Connection" in said or "SIGKILL" in said or "code -9" in said), (
        said
    )
    assert resumes(started.run, tmp_path) >= 2


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("options", "torchrun"), LAUNCHES[:3:2])
def test_killing_the_rank_that_writes_leaves_the_checkpoint_before(options, torchrun, job, tmp_path):
    disk = ["--trainer.plugins+=tests.rank_io.HangingDisk", "--trainer.plugins.at=4"]
    started = job([*options, *disk], torchrun=torchrun, iterations=100_000)
    started.wait_for(started.run / "checkpoints" / "half_written")
    os.kill(started.pids()[0], signal.SIGKILL)
    status, _ = started.ended(seconds=90)
    assert status != 0
    left = [path for path in (started.run / "checkpoints").iterdir() if path.name.startswith(".")]
    assert len(left) == 1  # the half-written one, under another name
    assert resumes(started.run, tmp_path) == 2


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("options", "torchrun"), LAUNCHES)
def test_sigterm_ends_all_ranks_after_the_iteration(options, torchrun, job, tmp_path):
    """To the process that was started alone, as SLURM and torchrun do; all save together."""
    started = job(options, torchrun=torchrun, iterations=100_000)
    started.running()
    started.process.terminate()
    status, said = started.ended(seconds=90)
    assert status != 0
    assert "SIGTERM: stopping after this iteration" in said
    iteration = resumes(started.run, tmp_path)
    assert f"broken off after iteration {iteration}. Resume with" in said
    assert iteration == max(rows(started.run))


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("options", "torchrun"), LAUNCHES[:2])
def test_control_c_ends_all_ranks_after_the_iteration(options, torchrun, job, tmp_path):
    started = job(options, torchrun=torchrun, iterations=100_000)
    started.running()
    os.killpg(started.process.pid, signal.SIGINT)
    status, said = started.ended(seconds=90)
    assert status != 0
    assert "SIGINT: stopping after this iteration" in said
    assert resumes(started.run, tmp_path) == max(rows(started.run))

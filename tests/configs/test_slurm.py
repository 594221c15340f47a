"""The SLURM script, with stand-ins for ``srun`` and ``scontrol``: what it starts, resumes and requeues."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

SRUN = """#!/bin/bash
printf '%s\\n' "$@" > started
trap 'exit 138' USR1  # handed on to the processes, which save and stop
trap 'exit 137' TERM  # srun kills them
[ -e finish_at_once ] && exit "$(cat finish_at_once)"
for _ in $(seq 200); do sleep 0.05; done
"""
SCONTROL = """#!/bin/bash
echo "$@" > requeued
"""


@pytest.fixture
def job(tmp_path, repository):
    """A call that submits: (options, exit status at once or None, signal to send) -> (status, what srun was given)."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    surroundings = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "4",
        "SLURM_NTASKS_PER_NODE": "8",
    }  # fmt: skip

    def submit(*options, status=None, number=None):
        if status is not None:
            (tmp_path / "finish_at_once").write_text(str(status))
        script = repository / "configs/slurm/train.sbatch"
        process = subprocess.Popen(["bash", script, "a.yaml", *options], cwd=tmp_path, env=surroundings)
        try:
            if number is not None:
                wait_for(tmp_path / "started")
                process.send_signal(number)
            return process.wait(timeout=30), (tmp_path / "started").read_text().split("\n")[:-1]
        finally:
            process.kill()

    return submit


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + 20
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.2)  # its trap is set


def test_it_starts_one_process_per_device(job):
    status, started = job("--config", "configs/trainer/fsdp2_hybrid.yaml", status=0)
    assert status == 0
    assert started == [
        "--kill-on-bad-exit=1", "python", "train.py", "fit", "--config", "a.yaml",
        "--trainer.default_root_dir", "runs/slurm/17", "--trainer.num_nodes", "4", "--trainer.devices", "8",
        "--config", "configs/trainer/fsdp2_hybrid.yaml",
    ]  # fmt: skip


def test_the_newest_checkpoint_of_the_job_is_resumed(job, tmp_path):
    for version, age in ((0, 300), (1, 100), (2, None)):
        folder = tmp_path / f"runs/slurm/17/version_{version}/checkpoints"
        folder.mkdir(parents=True)
        if age is not None:  # the last one was broken off before its first checkpoint
            (folder / "last.ckpt").touch()
            os.utime(folder / "last.ckpt", (time.time() - age,) * 2)
    _, started = job(status=0)
    assert started[-2:] == ["--ckpt_path", "runs/slurm/17/version_1/checkpoints/last.ckpt"]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_when_the_time_is_up_it_stops_and_is_requeued(number, job, tmp_path):
    status, _ = job(number=number)
    assert status == 138
    assert (tmp_path / "requeued").read_text() == "requeue 17\n"


@pytest.mark.parametrize("status", [0, 1])
def test_what_ends_by_itself_is_not_requeued(status, job, tmp_path):
    assert job(status=status)[0] == status
    assert not (tmp_path / "requeued").exists()

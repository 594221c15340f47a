"""The command that plans a run, as a person calls it. (All headers are compared in ``tests/configs``.)"""

import contextlib
import io
import warnings

import pytest

from benchmarks import plan as command
from benchmarks.plan import main, summary
from tests.headers import header_of

EXPERIMENT = "configs/experiment/sd35_medium/flowgrpo_fast.yaml"


@pytest.fixture(scope="module")
def planned(repository):
    """(plan, what was printed, what jsonargparse warned of)."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(io.StringIO()) as out,
        contextlib.redirect_stderr(io.StringIO()) as err,
        warnings.catch_warnings(record=True) as warned,
    ):
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "all")  # by default only a process's first one is shown
        warnings.simplefilter("always")
        plan = main([str(repository / EXPERIMENT)])
    about = [str(w.message) for w in warned if w.category.__name__.startswith("Jsonargparse")]
    return plan, out.getvalue() + err.getvalue(), about


def test_it_prints_the_plan_and_nothing_else(planned):
    plan, printed, warned = planned
    assert printed == f"{plan}\n" and warned == []


def test_the_vae_alone_is_called_the_vae(planned):
    """No text encoder is made, so none is counted."""
    plan, printed, _ = planned
    assert plan.encoder_bytes == 0 and plan.vae_bytes == plan.frozen_bytes > 0
    assert "encoders" not in printed
    assert printed.splitlines()[-1].split() == ["VAE", "320", "MiB", "beside", "it,", "on", "its", "own", "device"]


def test_the_experiments_header_holds_its_line(planned, repository, monkeypatch, capsys):
    monkeypatch.setattr(command, "plan_config", lambda file, device: planned[0])
    main([EXPERIMENT, "--line"])
    line = capsys.readouterr().out.strip()
    assert line == summary(planned[0]) and f"Plan: {line} " in header_of(repository / EXPERIMENT)

"""The plan as a run prints it, from a command line."""

import json

import pytest

from callbacks.plan_report import PlanReport
from tests import command_line
from tests.loop import fit, module
from train import main

PLAN = {"class_path": "callbacks.plan_report.PlanReport"}


def test_a_run_starts_with_its_plan(tmp_path, capsys):
    cli = main(["fit", "--config", command_line.write(tmp_path, callbacks=[PLAN], iterations=1)])
    printed = capsys.readouterr().out
    assert printed.index("plan             TinyPolicy under Retain") > printed.index("run folder")
    written = json.loads((tmp_path / "runs/version_0/plan.json").read_text())
    assert written["samples"] == 12 and written["trained_steps"] == 2  # 3 prompts x 4; int(0.7 x 3) steps
    assert written["forward_rows"] == cli.model.iteration_metrics["rows/forward"] == 12 * 4
    assert written["sigmas"] == cli.model.sigma_grid.tolist()


def test_a_run_without_a_prompt_datamodule_is_told_so(tmp_path):
    with pytest.raises(ValueError, match="not of NoneType: remove it"):
        fit(module(), 1, root=tmp_path, callbacks=[PlanReport()])

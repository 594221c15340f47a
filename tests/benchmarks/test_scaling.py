"""The five rows on two processes, and a cost model that knows one of them."""

import json

import pytest

from benchmarks import cost_model
from benchmarks.cost_model import calibrate, curves, table_1
from benchmarks.processes import on_ranks
from benchmarks.scaling import ROWS, Work, main, measure
from tests.ranks import pool

WORK = Work(model="sd35_medium", trainable="lora", strategy="fsdp2", generations=2, num_steps=3, turns=1, iterations=1)


def test_the_five_rows_on_two_processes():
    results = pool(2).run(measure, [WORK], 2)[0]
    by_row = {r.row: r for r in results}
    assert list(by_row) == list(ROWS)
    # 2 prompts x 2 generations, 2 trained steps, one sample a round: by prompt two rounds that close together, shared
    # one round a prompt
    assert [by_row[row].reductions for row in ROWS] == [4, 4, 2, 4, 2]
    assert [by_row[row].forward_rows for row in ROWS] == [20, 20, 20, 12, 12]  # 4 samples x (3 steps + 2 once more)
    assert all(r.seconds > 0 and r.bytes_reduced > 0 and r.peak_gradient_bytes > 0 for r in results)
    assert by_row["Native"].speedup == 1.0


@pytest.mark.slow
def test_the_command(tmp_path, capsys):
    main(["--quick", "--models", "shapes", "--ranks", "1", "2", "--strategy", "ddp", "--output", str(tmp_path)])
    record = json.loads((tmp_path / "scaling.json").read_text())
    assert [m["row"] for m in record["results"]["measured"]] == [*ROWS, *ROWS]
    printed = capsys.readouterr().out
    assert "1022.64" in printed and "-2.9%" in printed and "calibrated on it" in printed


def fail():
    raise ValueError("on purpose")


@pytest.mark.slow
def test_a_failing_process_ends_the_benchmark():
    with pytest.raises(RuntimeError, match=r"rank \d \(exit code 1\)"):
        on_ranks(2, fail)


def test_the_model_reproduces_what_it_was_calibrated_on():
    """Hand-worked from Figure 4: 24 late reductions take 30.33 s, so that the backward alone takes 504.82 s."""
    full, lora = calibrate()["full"], calibrate()["LoRA"]
    assert full.backward == pytest.approx(504.82)
    assert full.early == pytest.approx(484.62)
    assert full.rollout == pytest.approx(458.17)
    assert full.total("Native") == pytest.approx(1850.06)
    assert lora.total("Native") == pytest.approx(1277.30)
    assert full.total("Reweight") == pytest.approx(458.17 + 535.15)
    assert lora.early / full.early == pytest.approx(0.015066, rel=1e-4)


def test_the_other_rows_are_predicted_within_five_percent_and_the_error_is_stated():
    errors = {(p.training, p.row): p.error for p in table_1()}
    assert len(errors) == 10
    assert errors["full", "Reweight"] == pytest.approx(993.32 / 1022.64 - 1, abs=1e-4)
    assert errors["LoRA", "Retain"] == pytest.approx(865.84 / 901.99 - 1, abs=1e-4)
    assert max(map(abs, errors.values())) < 0.05


def test_on_the_paper_s_ranks_the_curve_is_the_table():
    for training, costs in calibrate().items():
        for row in ("Retain", "Reweight"):
            assert curves()[training][8][row] == pytest.approx(costs.total("Native") / costs.total(row))


def test_more_ranks_share_the_compute():
    from lightning_modules.parallel.layout import Layout

    on_16 = calibrate()["full"].on(16, Layout(prompts=24, generations=8, ranks=16))
    assert on_16.forward == pytest.approx(402.45 / 2)
    assert on_16.late == pytest.approx(30.33 / 2 * (15 / 16) / (7 / 8))  # two groups are complete at once
    assert cost_model.GROUPS * cost_model.GENERATIONS == 192

"""The alignment benchmark's own command line, and its numbers on a tiny model."""

import json

import pytest
import torch

from benchmarks.alignment import ONE_ROW, QUANTITIES, computing, main, take_step


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alignment")
    small = ["--workload.num_steps=3", "--workload.prompts=1", "--precisions=[fp32, bf16]"]
    return main(["--quick", "--output", str(folder), *small]), folder


def of(rows, **wanted):
    return [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]


def test_every_comparison_is_there_once(written):
    rows, _ = written
    keys = [(r.precision, r.trajectory, r.iteration, r.schedule, r.quantity) for r in rows]
    assert len(set(keys)) == len(keys) == 2 * 5 * (4 + 2 * 5)


def test_computing_in_bf16_on_fp32_weights():
    """Autocast covers the policy's matrix products; a no-grad call before must not take the weights' gradients away."""
    layer = torch.nn.Linear(2, 2)
    with computing("bf16-mixed", torch.device("cpu")):
        with torch.no_grad():
            layer(torch.ones(1, 2))
        out = layer(torch.ones(1, 2))
        out.float().sum().backward()
    assert out.dtype == torch.bfloat16
    assert layer.weight.dtype == layer.weight.grad.dtype == torch.float32
    with computing("fp32", torch.device("cpu")):
        assert layer(torch.ones(1, 2)).dtype == torch.float32


@pytest.mark.parametrize("trajectory", ["fixed", "end to end"])
def test_retain_is_native_bit_for_bit(written, trajectory):
    rows = of(written[0], schedule="Retain", trajectory=trajectory, precision="fp32")
    assert rows
    assert all(row.native.relative_l2 == row.native.max_abs == 0 for row in rows)
    assert all(row.native.cosine == pytest.approx(1, abs=1e-12) for row in rows)


@pytest.mark.parametrize("schedule", ["Reweight, per sample", "Reweight, streaming", ONE_ROW])
def test_fp32_differs_by_rounding_only(written, schedule):
    for row in of(written[0], schedule=schedule, precision="fp32", quantity="gradient"):
        assert 0 < row.native.relative_l2 < 1e-5


def test_distance_to_float64(written):
    """fp32 is close to the float64 reference and bf16 farther: the reference is no copy of either."""
    for schedule in ("Native", "Retain", "Reweight, per sample", "Reweight, streaming"):
        (single,) = of(written[0], schedule=schedule, precision="fp32", quantity="gradient", trajectory="fixed")
        (half,) = of(written[0], schedule=schedule, precision="bf16", quantity="gradient", trajectory="fixed")
        assert 0 < single.float64.relative_l2 < 1e-4
        assert 1e-3 < half.float64.relative_l2 < 0.3


def test_bf16_samples_of_single_rows_drift(written):
    drift = of(written[0], precision="bf16", trajectory="end to end", quantity="latents", iteration=1)
    by_schedule = {row.schedule: row.native.relative_l2 for row in drift}
    assert by_schedule["Native"] == 0
    assert 0 < by_schedule["Reweight, streaming"] < 0.1


def test_files(written, capsys):
    rows, folder = written
    record = json.loads((folder / "alignment.json").read_text())
    assert len(record["results"]["rows"]) == len(rows)
    assert record["results"]["rows"][0]["native"] == {"cosine": pytest.approx(1), "relative_l2": 0.0, "max_abs": 0.0}
    assert record["settings"]["micro_batch"] == 3
    assert (folder / "alignment.png").read_bytes().startswith(b"\x89PNG")


def test_take_step_by_hand():
    """AdamW's first step from gradient (3, -4) clipped to norm 1: moments 0.1 g and 0.001 g^2, a step of lr each."""
    policy = torch.nn.Linear(2, 1, bias=False).double()
    policy.weight.data.zero_()
    policy.weight.grad = torch.tensor([[3.0, -4.0]], dtype=torch.float64)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.01)
    vectors = take_step(policy, optimizer, lambda p: torch.nn.utils.clip_grad_norm_(p.parameters(), 1.0))
    assert set(vectors) == set(QUANTITIES)
    assert vectors["gradient"].tolist() == [3.0, -4.0]
    assert vectors["exp_avg"].tolist() == pytest.approx([0.06, -0.08], rel=1e-5)
    assert vectors["exp_avg_sq"].tolist() == pytest.approx([0.36e-3, 0.64e-3], rel=1e-5)
    assert vectors["update"].tolist() == pytest.approx([-0.01, 0.01], rel=1e-5)

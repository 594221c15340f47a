"""Table and JSON file."""

import json

import pytest

from benchmarks.report import environment, table, write_json


def test_table():
    assert table(["a", "bcd"], [["12", "3"]]) == "| a  | bcd |\n| -- | --- |\n| 12 | 3   |"


def test_json_holds_what_repeats_the_run(tmp_path):
    path = tmp_path / "new" / "toy.json"
    write_json(path, benchmark="toy", command="python -m benchmarks.toy", settings={"size": 1}, results={"rows": [1.5]})
    record = json.loads(path.read_text())
    assert record["settings"] == {"size": 1}
    assert record["results"] == {"rows": [1.5]}
    assert record["command"] == "python -m benchmarks.toy"
    assert {"torch", "diffusers", "lightning"} <= set(record["environment"]["versions"])
    assert record["environment"]["threads"] >= 1
    assert record["environment"]["cpu"]


def test_no_nan_in_json(tmp_path):
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "toy.json", benchmark="toy", command="", settings={}, results={"x": float("nan")})


def test_the_environment_outside_a_repository(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert environment()["commit"] is None

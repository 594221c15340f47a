"""The script of the real backbones, on its small preset."""

import contextlib
import io
import json

import pytest
import torch

from benchmarks.random_weights import described
from benchmarks.real_models import FULL, QUICK, main


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(results, JSON file, what was printed) of a run without a card."""
    folder, printed = tmp_path_factory.mktemp("results"), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(torch.cuda, "is_available", lambda: False)
        results = main(["--repetitions", "1", "--output", str(folder)])
    return results, folder / "real_models_small.json", printed.getvalue()


def test_every_model_and_schedule_is_measured(finished):
    results, _, _ = finished
    assert [(r.model, r.schedule) for r in results] == [
        (model, schedule) for model in FULL for schedule in ("Native", "Retain", "Reweight")
    ]
    for r in results:
        steps, trained = QUICK[r.model].num_steps, QUICK[r.model].num_steps - 1
        again = trained if r.schedule == "Native" else 0
        assert (r.forward_rows, r.backward_rows) == (2 * (steps + again), 2 * trained)
        assert r.seconds.median > 0 and r.phases["decode"] > 0 and r.planned_bytes > 0
        assert r.peak_bytes is None  # not measured on the CPU
    assert [r.speedup for r in results if r.schedule == "Native"] == [1.0, 1.0]


def test_the_results_can_be_repeated_from_their_file(finished):
    results, file, _ = finished
    written = json.loads(file.read_text())
    assert written["command"].startswith("python -m benchmarks.real_models --repetitions 1")
    assert written["settings"] == {"preset": "small", "repetitions": 1, "models": ["flux_dev", "sd35_medium"]}
    assert [u["schedule"] for u in written["results"]["updates"]] == [r.schedule for r in results]


def test_without_a_card_it_says_what_is_missing(finished):
    _, _, printed = finished
    assert "no CUDA device here" in printed and "need one card of 80 GB" in printed
    assert printed.count("not measured") == 6  # peak memory of every line


def test_quick_is_small_even_with_a_card(tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr("benchmarks.real_models.run", lambda case, repetitions: ran.append((case, repetitions)) or [])
    main(["--quick", "--models", "flux_dev", "--repetitions", "3", "--output", str(tmp_path)])
    assert ran == [(QUICK["flux_dev"], 3)] and QUICK["flux_dev"].device == "cpu"


def test_the_full_preset_is_the_papers_and_the_released_size():
    flux = FULL["flux_dev"]
    assert (flux.num_steps, flux.generations, flux.options["height"], flux.dtype) == (6, 8, 512, "bfloat16")
    assert all(case.smaller is None and case.device == "cuda" for case in FULL.values())
    for name, case in QUICK.items():
        assert case.smaller.keys() <= described("model", name)["init_args"].keys()


def test_no_repetition_is_refused():
    with pytest.raises(ValueError, match="repetitions=0: give at least 1"):
        main(["--repetitions", "0"])

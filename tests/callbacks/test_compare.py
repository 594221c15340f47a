import copy
import json
import runpy
import sys

import pytest

from callbacks.compare import check_comparable, compare, main, report
from callbacks.estimates import Evaluation, Measure
from callbacks.results import FORMAT, metrics_of

SETTINGS = {
    "benchmark": "X",
    "prompts": {"sha256": "p"},
    "sampler": {"num_steps": 40, "guidance": 4.5, "height": 512},
    "noise": {"seed": 0},
    "rewards": {"r": {"class": "R", "weights": {"clip": "abc"}}},
}
BASE = [[0.0, 0.2], [0.5, 0.5], [1.0, 1.0]]
BETTER = [[0.2, 0.2], [0.7, 0.5], [1.1, 1.3]]  # prompt means + 0.1, + 0.1, + 0.2


def result(scores=BASE, weights="w", tags="aab", **changes):
    table = [
        {"index": k, "prompt": f"p{k}", "tag": tag, "scores": {"r": row}}
        for k, (row, tag) in enumerate(zip(scores, tags, strict=True))
    ]
    measures = {"overall": Measure(reward="r"), "a": Measure(reward="r", tag="a")}
    return {
        "format": FORMAT,
        "name": "set",
        "metrics": metrics_of(Evaluation.of(table, 1), measures),
        "settings": copy.deepcopy(SETTINGS),
        "model": {
            "policy": {"class": "policies.P"}, "trained_weights": weights, "frozen_weights": "f", "averaged": False, "iteration": 1,
        },
        "versions": {"torch": "2.0"},
        "device": "cpu",
        "batch_size": 4,
        "prompts": table,
    } | changes  # fmt: skip


def changed(dotted, value):
    settings = copy.deepcopy(SETTINGS)
    *path, last = dotted.split(".")
    node = settings
    for name in path:
        node = node[name]
    node[last] = value
    return result(settings=settings)


def test_differences_are_paired_and_clustered_by_prompt():
    """d = 0.1, 0.1, 0.2: mean 0.1333, stderr 0.0577 / sqrt 3 = 0.0333, t(0.975, 2) = 4.3027."""
    overall, a = compare(result(), result(BETTER))
    assert (overall.metric, a.metric) == ("overall", "a")
    assert overall.paired
    assert overall.change.mean == pytest.approx(0.4 / 3)
    assert overall.change.stderr == pytest.approx(0.1 / 3)
    assert overall.change.interval() == pytest.approx((0.4 / 3 - 0.14342, 0.4 / 3 + 0.14342), abs=1e-4)
    assert (a.change.mean, a.change.stderr) == (pytest.approx(0.1), pytest.approx(0.0, abs=1e-12))


def test_other_prompts_are_compared_unpaired():
    (overall, *_) = compare(result(), result(BETTER[:2], tags="ab"))
    assert not overall.paired
    assert overall.change.mean == pytest.approx((0.2 + 0.6) / 2 - 1.6 / 3)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("sampler.guidance", 1.0),
        ("sampler.num_steps", 10),
        ("noise.seed", 1),
        ("rewards.r.weights.clip", "xyz"),
        ("prompts.sha256", "q"),
    ],
)
def test_other_settings_are_refused_by_name_unless_allowed(setting, value):
    pair = [result(), changed(setting, value)]
    with pytest.raises(ValueError, match=f"(?s)different settings.*  {setting}: .* in A, .* in B\n.*--allow"):
        check_comparable(pair)
    with pytest.raises(ValueError, match=setting):
        check_comparable(pair, ["benchmark", setting[:-1]])
    for allow in (setting, setting.split(".")[0], "all"):
        check_comparable(pair, [allow])
        assert f"note: settings.{setting} " in report("xy", pair, [allow])


def test_results_with_other_rewards_share_what_they_have_in_common():
    more = result(BETTER)
    for row in more["prompts"]:
        row["scores"]["s"] = [1.0, 1.0]
    for pair in ((result(), more), (more, result())):
        overall, _ = compare(*pair)
        assert overall.paired
        assert abs(overall.change.mean) == pytest.approx(0.4 / 3)
        assert overall.change.stderr == pytest.approx(0.1 / 3)


def test_a_setting_that_only_one_has_is_a_difference():
    with pytest.raises(ValueError, match="sampler.negative_prompt: '.not there.' in A, 'ugly' in B"):
        check_comparable([result(), changed("sampler.negative_prompt", "ugly")])


def test_every_file_is_checked_against_the_first():
    with pytest.raises(ValueError, match="noise.seed: 0 in A, 3 in C"):
        check_comparable([result(), result(BETTER), changed("noise.seed", 3)])


def test_versions_are_told_and_not_refused():
    text = report("xy", [result(), result(BETTER, "v", versions={"torch": "3.0"})])
    assert "note: versions.torch '2.0' in A, '3.0' in B" in text
    assert "same weights" not in text


def test_the_report_of_several():
    lines = report(["base", "mid", "end"], [result(), result(), result(BETTER, "v")]).splitlines()
    assert lines[0] == "A  set: P, iteration 1, weights w  base"
    assert "B - A, paired by prompt" in lines
    assert "  note: both are of the same weights" in lines
    assert "C - A, paired by prompt" in lines
    (row,) = [line for line in lines if line.startswith("  overall") and "0.6667" in line]
    assert row.split() == [
        "overall",
        "0.5333",
        "+-",
        "0.2603",
        "0.6667",
        "+-",
        "0.2906",
        "+0.1333",
        "[-0.0101,",
        "+0.2768]",
    ]
    assert any(line.startswith("  overall") and line.endswith("(the same for every prompt)") for line in lines)


def test_nothing_in_common_says_so():
    other = result()
    other["metrics"] = {"x": other["metrics"]["overall"]}
    with pytest.raises(ValueError, match="no metric in common: overall, a and x"):
        compare(result(), other)


def write(folder, *results):
    for name, content in zip("abc", results, strict=False):
        (folder / f"{name}.json").write_text(json.dumps(content))
    return [str(folder / f"{name}.json") for name, _ in zip("abc", results, strict=False)]


def test_the_command_exits_with_the_reason(tmp_path, capsys):
    files = write(tmp_path, result(), changed("noise.seed", 1))
    for args, reason in (
        (files, "noise.seed"),
        (files[:1], "at least two"),
        ([files[0], str(tmp_path / "no.json")], "cannot read"),
    ):
        with pytest.raises(SystemExit) as exit:
            main(args)
        assert exit.value.code == 2
        assert reason in capsys.readouterr().err
    main([*files, "--allow", "noise"])
    assert "+0.0000" in capsys.readouterr().out


def test_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["compare", *write(tmp_path, result(), result(BETTER, "v"))])
    with pytest.warns(RuntimeWarning, match="found in sys.modules"):  # this test has imported it already
        runpy.run_module("callbacks.compare", run_name="__main__")
    assert "+0.1333" in capsys.readouterr().out

import json
import os
import shutil

import pytest
import torch

from callbacks.estimates import Evaluation, Measure
from callbacks.results import (
    FORMAT,
    digest,
    evaluation_of,
    file_sha256,
    measures_of,
    metrics_of,
    read_result,
    result_folder,
)
from datamodules.prompts import Prompt
from lightning_modules.parallel.ranks import Ranks

TABLE = [
    {"index": p, "prompt": f"p{p}", "tag": tag, "scores": {"r": scores}}
    for p, (tag, scores) in enumerate([("a", [0.1, 0.3]), ("a", [0.7, 0.7]), ("b", [1.0, 0.0])])
]


def test_metrics_and_scores_survive_a_file(tmp_path):
    measures = {"overall": Measure(reward="r", balanced=True), "a": Measure(reward="r", tag="a")}
    evaluation = Evaluation.of(TABLE, 7)
    result = {
        "format": FORMAT,
        "metrics": metrics_of(evaluation, measures),
        "prompts": TABLE,
        "model": {"iteration": 7},
    }
    (tmp_path / "result.json").write_text(json.dumps(result))
    for path in (tmp_path, tmp_path / "result.json"):
        read = read_result(path)
        assert measures_of(read) == measures
        assert torch.equal(evaluation_of(read).means["r"], evaluation.means["r"])
        assert evaluation_of(read).iteration == 7
    assert result["metrics"]["a"]["mean"] == pytest.approx(0.45)
    assert result["metrics"]["overall"]["mean"] == pytest.approx(0.475)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "no valid JSON"),
        ("[]", f"is no {FORMAT}"),
        ('{"format": "other"}', f"is no {FORMAT}"),
    ],
)
def test_what_is_no_result_says_so(tmp_path, content, message):
    file = tmp_path / "x.json"
    if content is not None:
        file.write_text(content)
    with pytest.raises(ValueError, match=f"{file.name}.*{message}|{message}.*{file.name}"):
        read_result(file)


def test_the_digest_is_of_the_prompts_and_not_of_the_file():
    def prompts(*rows):
        return [Prompt(text=row["prompt"], metadata=row) for row in rows]

    one, other = {"prompt": "a", "tag": "t", "n": 1}, {"prompt": "b"}
    same = digest(prompts(one, other))
    assert digest(prompts({"n": 1, "tag": "t", "prompt": "a"}, other)) == same
    assert len({same, digest(prompts(other, one)), digest(prompts({**one, "n": 2}, other)), digest(prompts(one))}) == 4


def test_a_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "deep" / "result"
    with result_folder(target, Ranks.alone(), "x") as folder:
        (folder / "file").write_text("new")
        assert not target.exists()
    assert (target / "file").read_text() == "new"
    assert os.listdir(target.parent) == ["result"]


def test_it_replaces_an_earlier_one_as_a_whole(tmp_path):
    for content in ("first", "second"):
        with result_folder(tmp_path / "r", Ranks.alone(), "x") as folder:
            (folder / content).write_text(content)
    assert os.listdir(tmp_path / "r") == ["second"]
    assert os.listdir(tmp_path) == ["r"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failure_leaves_the_earlier_one_and_no_litter(tmp_path, error):
    with result_folder(tmp_path / "r", Ranks.alone(), "x") as folder:
        (folder / "first").write_text("")
    with pytest.raises(error), result_folder(tmp_path / "r", Ranks.alone(), "x") as folder:
        (folder / "half").write_text("")
        raise error
    assert os.listdir(tmp_path / "r") == ["first"]
    assert os.listdir(tmp_path) == ["r"]


def test_what_a_killed_process_left_is_removed(tmp_path):
    (tmp_path / ".r.partial").mkdir()
    (tmp_path / ".r.partial" / "half").write_text("")
    with result_folder(tmp_path / "r", Ranks.alone(), "x") as folder:
        assert os.listdir(folder) == []
    assert os.listdir(tmp_path) == ["r"]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    message = "cannot write .*file/r: Not a directory; free some space or"
    with pytest.raises(ValueError, match=message), result_folder(tmp_path / "file" / "r", Ranks.alone(), "x"):
        pass


def test_checksums(tmp_path):
    (tmp_path / "f").write_bytes(b"abc")
    assert (
        file_sha256(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )  # FIPS 180-2
    shutil.copy(tmp_path / "f", tmp_path / "g")
    assert file_sha256(str(tmp_path / "g")) == file_sha256(tmp_path / "f")
    assert file_sha256(None) is file_sha256(tmp_path) is None

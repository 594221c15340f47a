import json

import pytest

from rewards.geneval import Verdict
from rewards.geneval_rules import Judgement
from rewards.geneval_summary import TAGS, record, summarise


def verdict(correct, objects=None):
    judgement = Judgement(correct=correct, strict_correct=correct, soft_score=0.5, reason="" if correct else "no cat")
    return Verdict(judgement=judgement, objects=objects or {})


def row(tag, prompt):
    return {"tag": tag, "prompt": prompt, "include": [{"class": "cat", "count": 1}]}


def records(**correct):
    """tag -> verdicts of its images, two images a prompt."""
    return [
        record(f"{tag}/{n}.png", row(tag, f"{tag} {n // 2}"), verdict(value, {"cat": []} if value else {}))
        for tag, values in correct.items()
        for n, value in enumerate(values)
    ]


def test_the_official_fields():
    metadata = row("single_object", "a photo of a cat, \N{LATIN SMALL LETTER E WITH ACUTE}")
    objects = {
        "cat": [
            {"box": [1.0, 2.0, 3.0, 4.0], "score": 0.9, "color": "red"},
            {"box": [0.0, 0.0, 8.0, 8.0], "score": 0.4, "color": ""},
        ],
        "dog": [{"box": [5.0, 5.0, 6.0, 6.0], "score": 0.5, "color": ""}],
    }
    line = record("out/00000/samples/0000.png", metadata, verdict(False, objects))
    assert list(line) == ["filename", "tag", "prompt", "correct", "reason", "metadata", "details"]
    assert (line["filename"], line["tag"], line["prompt"]) == (
        "out/00000/samples/0000.png",
        "single_object",
        metadata["prompt"],
    )
    assert (line["correct"], line["reason"]) == (False, "no cat")
    assert json.loads(line["metadata"]) == metadata
    assert json.loads(line["details"]) == {
        "cat": [[1.0, 2.0, 3.0, 4.0, 0.9], [0.0, 0.0, 8.0, 8.0, 0.4]],
        "dog": [[5.0, 5.0, 6.0, 6.0, 0.5]],
    }
    assert json.loads(json.dumps(line)) == line


def test_a_summary_by_hand():
    yes, no = True, False
    lines = records(
        color_attr=[no, no, no, no],
        single_object=[yes, yes],
        two_object=[yes, no],
        counting=[no, no, yes, no],
        colors=[yes, yes, yes, no],
        position=[no, no],
    )
    summary = summarise(reversed(lines))
    assert list(summary.per_tag) == list(TAGS)
    assert summary.per_tag == {
        "single_object": 1.0,
        "two_object": 0.5,
        "counting": 0.25,
        "colors": 0.75,
        "position": 0.0,
        "color_attr": 0.0,
    }
    assert summary.overall == pytest.approx(2.5 / 6)
    assert summary.accuracy_over_images == pytest.approx(7 / 18)  # another number than the mean of the tags
    assert summary.accuracy_over_prompts == pytest.approx(5 / 9)
    assert (summary.images, summary.prompts, summary.images_without_objects) == (18, 9, 11)
    assert summary.images_per_tag["counting"] == 4
    assert json.loads(json.dumps(summary.as_dict()))["overall"] == summary.overall


def test_overall_needs_all_six_tags():
    summary = summarise(records(colors=[True, False]))
    assert summary.overall is None
    assert summary.per_tag == {"colors": 0.5}


def test_what_cannot_be_summarised():
    with pytest.raises(ValueError, match="no records to summarise"):
        summarise([])
    with pytest.raises(ValueError, match="x.png has the tag 'texture': GenEval's are single_object"):
        summarise([record("x.png", row("texture", "a"), verdict(True))])

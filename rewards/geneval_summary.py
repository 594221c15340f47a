"""GenEval's records and summary: pure functions on plain values, in the official fields.

One record per image (a line of ``results.jsonl``, as written by ``evaluate_images.py`` of the public repository
djghosh13/geneval): ``filename, tag, prompt, correct, reason, metadata, details``, the last two as JSON texts. The summary is
that of its ``summary_scores.py``; "the GenEval score" of a model is ``overall``::

    accuracy(tag)        = mean over the images of the tag of [correct]
    overall              = mean over the six tags of accuracy(tag)
    accuracy_over_images = mean over all images of [correct]

The last is another number, since tags have from 80 to 100 prompts; some repositories report it as the score.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rewards.geneval import Verdict

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")

Record = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Of all records of an evaluation. Accuracies are in [0, 1]."""

    overall: float | None
    """Mean of the six tags' accuracies; None unless all six are there."""
    per_tag: dict[str, float]
    """tag -> accuracy, tags in the order of :data:`TAGS`."""
    images_per_tag: dict[str, int]
    accuracy_over_images: float
    accuracy_over_prompts: float
    """Share of the prompts of which at least one image is correct."""
    images: int
    prompts: int
    images_without_objects: int
    """On which nothing at all was detected. Where these are nearly all, suspect the detector and not the model."""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def record(filename: str, metadata: Mapping[str, Any], verdict: Verdict) -> Record:
    """The official record of one image.

    Args:
        filename: of the image.
        metadata: the prompt's line, with ``tag`` and ``prompt``.
        verdict: of :meth:`GenEval.evaluate`.

    Returns:
        The seven fields; ``details`` maps each detected class to its ``[x0, y0, x1, y1, score]`` in pixels.
    """
    boxes = {name: [[*item["box"], item["score"]] for item in items] for name, items in verdict.objects.items()}
    return {
        "filename": filename,
        "tag": metadata["tag"],
        "prompt": metadata["prompt"],
        "correct": verdict.judgement.correct,
        "reason": verdict.judgement.reason,
        "metadata": json.dumps(dict(metadata)),
        "details": json.dumps(boxes),
    }


def summarise(records: Iterable[Mapping[str, Any]]) -> Summary:
    """The summary of records in any order. Errors: ``ValueError`` without records or on an unknown tag."""
    by_tag: dict[str, list[bool]] = {tag: [] for tag in TAGS}
    by_prompt: dict[str, bool] = {}
    empty = 0
    for row in records:
        if row["tag"] not in by_tag:
            raise ValueError(f"{row['filename']} has the tag {row['tag']!r}: GenEval's are {', '.join(TAGS)}")
        by_tag[row["tag"]].append(row["correct"])
        by_prompt[row["metadata"]] = by_prompt.get(row["metadata"], False) or row["correct"]
        empty += not json.loads(row["details"])
    seen = {tag: verdicts for tag, verdicts in by_tag.items() if verdicts}
    if not seen:
        raise ValueError("no records to summarise: evaluate at least one image")
    accuracy = {tag: sum(verdicts) / len(verdicts) for tag, verdicts in seen.items()}
    images = sum(len(verdicts) for verdicts in seen.values())
    return Summary(
        overall=sum(accuracy.values()) / len(TAGS) if len(seen) == len(TAGS) else None,
        per_tag=accuracy,
        images_per_tag={tag: len(verdicts) for tag, verdicts in seen.items()},
        accuracy_over_images=sum(sum(verdicts) for verdicts in seen.values()) / images,
        accuracy_over_prompts=sum(by_prompt.values()) / len(by_prompt),
        images=images,
        prompts=len(by_prompt),
        images_without_objects=empty,
    )

"""GenEval (Ghosh et al. 2023, arXiv:2310.11513) as an evaluation: 553 prompts, 4 images each, six kinds of tasks.

``overall``               mean of the six tags' accuracies: GenEval's score
``<tag>``                 accuracy over the tag's images
``accuracy_over_images``  accuracy over all images, which some repositories report as the score
``strict``, ``soft``      means over all images of the exact-count verdict and of the partial credit (rewards.geneval_rules)

An accuracy is a mean over prompts of the share of correct images. Images lie as the official scripts (public repository
djghosh13/geneval) write and read them, ``images/<prompt>/{metadata.jsonl,samples/<image>.png}``, and ``results.jsonl`` has their
fields. The judge is an argument: with the default detector call the result ``geneval_hf`` and compare it with itself, with the
embedded world's detector everything else is the same code.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from callbacks.benchmark import Benchmark, Line, by_category
from callbacks.estimates import Evaluation, Measure
from datamodules.prompts import Prompt
from lightning_modules.types import DrawingSettings, Samples
from rewards.base import Reward
from rewards.geneval import GenEval
from rewards.geneval_summary import TAGS, record, summarise

SUSPICIOUS = 0.9
"""Share of images without any detected object above which the detector is suspected."""


class GenEvalEvaluation(Benchmark):
    """GenEval on any prompts with its metadata.

    Args:
        judge: detector, colours and thresholds; its ``mode`` plays no part.
        name: ``None``: the judge's, ``geneval_<detector>``.
        Others: see :class:`callbacks.benchmark.Benchmark`.

    Errors: ``ValueError`` also on prompts without one of the six tags, before any work.
    """

    prepared = ("geneval", "geneval_metadata.jsonl")

    def __init__(
        self,
        *,
        prompts: str,
        judge: GenEval,
        name: str | None = None,
        images_per_prompt: int = 4,
        sampler: DrawingSettings | None = None,
        batch_size: int = 16,
        seed: int = 0,
        every: int = 0,
        before: bool = True,
        after: bool = True,
        keep_images: bool = True,
    ) -> None:
        if not isinstance(judge, GenEval):
            raise ValueError(f"judge is a {type(judge).__name__}: give a rewards.geneval.GenEval")
        super().__init__(
            name=name or judge.name, prompts=prompts, images_per_prompt=images_per_prompt, sampler=sampler,
            batch_size=batch_size, seed=seed, every=every, before=before, after=after, keep_images=keep_images,
        )  # fmt: skip
        self._judge = judge

    @property
    def scorers(self) -> dict[str, Reward]:
        return {"geneval": self._judge}

    def choose(self, prompts: list[Prompt]) -> list[Prompt]:
        for prompt in prompts:
            if prompt.metadata.get("tag") not in TAGS:
                raise ValueError(
                    f"prompt {prompt.text!r} of {self.prompts} has the tag {prompt.metadata.get('tag')!r}, GenEval's are "
                    f"{', '.join(TAGS)}: get its prompts by `python -m datamodules.prepare geneval`"
                )
        return prompts

    def assess(self, samples: Samples, files: Sequence[str], when: str) -> tuple[dict[str, Tensor], list[Line]]:
        verdicts = self._judge.evaluate(samples.images, samples.metadata)
        scores = {
            mode: torch.tensor([verdict.score(mode) for verdict in verdicts], dtype=torch.float64)
            for mode in ("correct", "strict", "soft")
        }
        return scores, [record(*one) for one in zip(files, samples.metadata, verdicts, strict=True)]

    def measures(self, evaluation: Evaluation) -> dict[str, Measure]:
        """``overall`` is named so where all six tags occur, else ``mean_over_tags``."""
        complete = set(evaluation.categories) == set(TAGS)
        return {
            "overall" if complete else "mean_over_tags": Measure(reward="correct", balanced=True),
            **by_category(evaluation, "correct"),
            "accuracy_over_images": Measure(reward="correct"),
            "strict": Measure(reward="strict"),
            "soft": Measure(reward="soft"),
        }

    def ranking(self, evaluation: Evaluation) -> str:
        return "soft"  # the verdict alone would leave no order

    def other(self, evaluation: Evaluation, lines: Sequence[Line]) -> dict[str, Any]:
        """The official summary: ``summary``."""
        summary = summarise(lines)
        if summary.images_without_objects > SUSPICIOUS * summary.images:
            warnings.warn(
                f"nothing at all was detected in {summary.images_without_objects} of {summary.images} images: look at them, and "
                "if they show objects do not believe this result, the detector is at fault",
                stacklevel=2,
            )
        return {"summary": summary.as_dict()}

    def identities(self) -> dict[str, Any]:
        return {"geneval": {name: value for name, value in self._judge.identity().items() if name != "mode"}}

    def place(self, prompt_index: int, image_index: int) -> Path:
        return Path(f"{prompt_index:05d}") / "samples" / f"{image_index:04d}.png"

    def accompany(self, folder: Path, prompt_index: int) -> None:
        metadata = json.dumps(self._chosen[prompt_index].metadata)
        (folder / f"{prompt_index:05d}" / "metadata.jsonl").write_text(metadata, encoding="utf-8")

"""The HPSv2 benchmark (Wu et al. 2023, arXiv:2306.09341): 4 styles of 800 prompts, one image each.

Reported, as by the public package (github.com/tgxs002/HPSv2): 100 times the score's mean per style and over all prompts, and
per style the standard deviation (the population's) of the means of 10 consecutive tenths of its prompts; of 800, chunks of 80.
The prompt file is made by ``python -m datamodules.prepare hpdv2``. The package scores the JPEG files that its users save,
these scores are of the images themselves, 8 bits per channel.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from callbacks.benchmark import Benchmark, Line, by_category, is_folder_name
from callbacks.estimates import Evaluation, Measure
from callbacks.prompt_set_evaluation import scored_lines
from callbacks.scoring import check_rewards, score
from datamodules.prompts import Prompt
from lightning_modules.types import DrawingSettings, Samples
from rewards.base import Reward

CHUNKS = 10
REWARD = "hpsv2"
TIMES = 100.0


class HPSv2Benchmark(Benchmark):
    """``overall``, the mean over all prompts, and one mean per style.

    Args:
        reward: raw scores, such as ``rewards.hpsv2.HPSv2(scale="raw")``; they are multiplied by 100.
        subset: number of prompts to use, the same of each style and evenly spread over it; ``None``: all. 400 make a quick
            benchmark of its own, to be compared with itself.
        Others: see :class:`callbacks.benchmark.Benchmark`.

    Errors: ``ValueError`` also if a prompt names no ``style``, if ``subset`` is not the same multiple of 10 of each style's
    prompts, and if the reward is scaled by 100 already.
    """

    category = "style"
    prepared = ("hpdv2", "hpdv2.jsonl")

    def __init__(
        self,
        *,
        prompts: str,
        reward: Reward,
        name: str = "hpsv2",
        subset: int | None = None,
        images_per_prompt: int = 1,
        sampler: DrawingSettings | None = None,
        batch_size: int = 16,
        seed: int = 0,
        every: int = 0,
        before: bool = True,
        after: bool = True,
        keep_images: bool = True,
    ) -> None:
        super().__init__(
            name=name, prompts=prompts, images_per_prompt=images_per_prompt, sampler=sampler, batch_size=batch_size,
            seed=seed, every=every, before=before, after=after, keep_images=keep_images,
        )  # fmt: skip
        self.reward = check_rewards({REWARD: reward})[REWARD]
        if getattr(reward, "scale", "raw") != "raw":
            raise ValueError(
                f"scale={getattr(reward, 'scale', None)!r}: the benchmark multiplies by 100; set scale: raw"
            )
        self.subset = subset
        self._styles: list[str] = []

    @property
    def scorers(self) -> dict[str, Reward]:
        return {REWARD: self.reward}

    def choose(self, prompts: list[Prompt]) -> list[Prompt]:
        of_style: dict[str, list[Prompt]] = {}
        for prompt in prompts:
            style = prompt.metadata.get(self.category)
            if not isinstance(style, str) or not is_folder_name(style):
                raise ValueError(
                    f"prompt {prompt.text!r} of {self.prompts} names no style that a folder can be called by ({style!r}): "
                    "make the file by `python -m datamodules.prepare hpdv2`"
                )
            of_style.setdefault(style, []).append(prompt)
        chosen = [prompt for style, some in of_style.items() for prompt in self._of_style(style, some, len(of_style))]
        self._styles = [prompt.metadata[self.category] for prompt in chosen]
        return chosen

    def _of_style(self, style: str, prompts: list[Prompt], styles: int) -> list[Prompt]:
        """Those to use of one of ``styles`` styles."""
        if self.subset is not None and (self.subset % (styles * CHUNKS) or self.subset > styles * len(prompts)):
            raise ValueError(
                f"subset={self.subset}: the {styles} styles give the same number each, in {CHUNKS} equal chunks; give a "
                f"multiple of {styles * CHUNKS}, at most {styles * (len(prompts) // CHUNKS * CHUNKS)}"
            )
        count = len(prompts) if self.subset is None else self.subset // styles
        if count % CHUNKS:
            raise ValueError(
                f"{self.prompts} has {count} prompts of the style {style!r}, which do not make {CHUNKS} equal chunks: complete "
                "the file, or set a subset"
            )
        return [prompts[i * len(prompts) // count] for i in range(count)]

    def assess(self, samples: Samples, files: Sequence[str], when: str) -> tuple[dict[str, Tensor], list[Line]]:
        scores = {REWARD: TIMES * score(self.reward, samples, name=REWARD, when=when)}
        return scores, scored_lines(samples, files, scores)

    def measures(self, evaluation: Evaluation) -> dict[str, Measure]:
        return {"overall": Measure(reward=REWARD), **by_category(evaluation, REWARD)}

    def other(self, evaluation: Evaluation, lines: Sequence[Line]) -> dict[str, Any]:
        """``std_over_chunks/<style>``."""
        means = evaluation.means[REWARD]
        return {
            f"std_over_chunks/{style}": _spread(means[torch.tensor([tag == style for tag in evaluation.tags])])
            for style in evaluation.categories
        }

    def identities(self) -> dict[str, Any]:
        return {name: identity | {"times": TIMES} for name, identity in super().identities().items()}

    def place(self, prompt_index: int, image_index: int) -> Path:
        """``<style>/<index in the style>.png``, the package's layout; further images of a prompt have ``_<image>``."""
        style = self._styles[prompt_index]
        number = prompt_index - self._styles.index(style)
        return Path(style) / (f"{number:05d}.png" if image_index == 0 else f"{number:05d}_{image_index}.png")


def _spread(values: Tensor) -> float:
    """Standard deviation over the means of consecutive tenths."""
    return values.reshape(CHUNKS, -1).mean(1).std(correction=0).item()

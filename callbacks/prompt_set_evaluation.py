"""Any prompt file, any rewards: DrawBench, PickScore's and OCR's test prompts, or one's own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from callbacks.benchmark import Benchmark, Line, by_category
from callbacks.estimates import Evaluation, Measure
from callbacks.scoring import check_rewards, score
from lightning_modules.types import DrawingSettings, Samples
from rewards.base import Reward


class PromptSetEvaluation(Benchmark):
    """The mean of each reward over all prompts, and in each category that occurs.

    Args:
        rewards: by name.
        main: name of the reward that the evaluation is read by.
        category: key of a prompt's metadata that names its category; DrawBench's is ``category``.
        Others: see :class:`callbacks.benchmark.Benchmark`.
    """

    def __init__(
        self,
        *,
        name: str,
        prompts: str,
        rewards: dict[str, Reward],
        main: str,
        category: str = "tag",
        images_per_prompt: int = 4,
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
        self.rewards = check_rewards(rewards)
        if main not in self.rewards:
            raise ValueError(f"main={main!r} is none of the rewards: choose one of {sorted(self.rewards)}")
        self.main, self.category = main, category

    @property
    def scorers(self) -> dict[str, Reward]:
        return self.rewards

    def assess(self, samples: Samples, files: Sequence[str], when: str) -> tuple[dict[str, Tensor], list[Line]]:
        scores = {name: score(reward, samples, name=name, when=when) for name, reward in self.rewards.items()}
        return scores, scored_lines(samples, files, scores)

    def measures(self, evaluation: Evaluation) -> dict[str, Measure]:
        names = [self.main, *(name for name in self.rewards if name != self.main)]
        found = {name: Measure(reward=name) for name in names}
        for name in names:
            found |= {f"{name}/{tag}": measure for tag, measure in by_category(evaluation, name).items()}
        return found


def scored_lines(samples: Samples, files: Sequence[str], scores: dict[str, Tensor]) -> list[Line]:
    """``filename``, ``prompt`` and ``scores`` of each sample."""
    return [
        {
            "filename": file,
            "prompt": samples.prompts[i],
            "scores": {name: values[i].item() for name, values in scores.items()},
        }
        for i, file in enumerate(files)
    ]

"""Held-out scores with honest error bars.

The P prompts of the set are the sample, their images are not: the images of one prompt resemble each other. With
``y_p`` the mean score of prompt p over its images,

    mean = 1/P sum_p y_p,       stderr = s_y / sqrt(P),      s_y^2 = 1/(P - 1) sum_p (y_p - mean)^2,

the standard error clustered by prompt. Before and after training the same prompts are drawn from the same noise, so the
difference is estimated from the pairs, ``d_p = y_p(after) - y_p(before)``, in the same way; what makes some prompts
harder than others cancels. Source: Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640).

Some benchmarks count each of K categories the same, however many prompts it has: with category k's mean and standard error,

    mean = 1/K sum_k mean_k,    stderr = 1/K sqrt(sum_k stderr_k^2),

of ``(sum_k stderr_k^2)^2 / sum_k stderr_k^4 / (P_k - 1)`` degrees of freedom (Welch 1947), where a plain mean has P - 1.
Intervals are Student's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lightning_modules.types import Samples


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean over prompts."""

    mean: float
    stderr: float
    """Clustered by prompt; NaN for a single prompt."""
    freedom: float = math.inf
    """Degrees of freedom of the standard error."""

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """Student's confidence interval; NaN for a single prompt."""
        from scipy.stats import t  # takes half a second to import

        half = float(t.ppf((1 + level) / 2, self.freedom)) * self.stderr if self.stderr else 0.0
        return self.mean - half, self.mean + half


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Which number of an evaluation: a reward's mean over what."""

    reward: str
    tag: str | None = None
    """Over the prompts of this category alone; ``None``: of all."""
    balanced: bool = False
    """Each category counts the same, instead of each prompt."""


def estimate(prompt_means: Tensor) -> Estimate:
    """``y_p [P]`` -> mean and standard error."""
    count = len(prompt_means)
    assert count > 0
    return Estimate(mean=prompt_means.mean().item(), stderr=_stderr(prompt_means), freedom=max(count - 1, 1))


def balanced(parts: Sequence[Estimate]) -> Estimate:
    """Mean of independent estimates."""
    variances = [part.stderr**2 for part in parts]
    total = math.fsum(variances)
    spread = math.fsum(v**2 / part.freedom for v, part in zip(variances, parts, strict=True))
    return Estimate(
        mean=math.fsum(part.mean for part in parts) / len(parts),
        stderr=math.sqrt(total) / len(parts),
        freedom=total**2 / spread if spread else math.fsum(part.freedom for part in parts),
    )


def difference(after: Estimate, before: Estimate) -> Estimate:
    """Of two independent samples, as Welch's test has it."""
    half = balanced([after, before])  # the variance of a difference is that of a sum
    return Estimate(mean=after.mean - before.mean, stderr=2 * half.stderr, freedom=half.freedom)


def _stderr(values: Tensor) -> float:
    return float("nan") if len(values) < 2 else (values.std(correction=1) / len(values) ** 0.5).item()


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The scores of one policy on one set of prompts, averaged over the images of each prompt."""

    iteration: int
    """Rollouts the policy had been trained for."""
    prompts: tuple[str, ...]
    """[P] text, in the order of the file."""
    tags: tuple[str, ...]
    """[P] category of the prompt (its metadata's ``tag``); "" where it has none."""
    images: tuple[int, ...]
    """[P] images drawn of the prompt."""
    means: dict[str, Tensor]
    """reward -> ``y_p``, [P] float64."""

    @property
    def categories(self) -> list[str]:
        """The tags that occur, in the order of the file."""
        return [tag for tag in dict.fromkeys(self.tags) if tag]

    def estimate(self, reward: str, tag: str | None = None) -> Estimate:
        """Mean score of a reward, over all prompts or over one category."""
        return self.measure(Measure(reward=reward, tag=tag))

    def change(self, before: Evaluation, reward: str, tag: str | None = None) -> Estimate:
        """Paired difference to an earlier evaluation of the same set."""
        return self.measured_change(before, Measure(reward=reward, tag=tag))

    def measure(self, what: Measure) -> Estimate:
        return self._average(self.means[what.reward], what)

    def measured_change(self, before: Evaluation, what: Measure) -> Estimate:
        """Paired difference to another evaluation of the same set."""
        assert self.paired(before)
        return self._average(self.means[what.reward] - before.means[what.reward], what)

    @classmethod
    def of(cls, table: Sequence[Mapping[str, Any]], iteration: int) -> Evaluation:
        """From rows as :meth:`Tally.table` gives them, at least one."""
        names = list(table[0]["scores"])
        return cls(
            iteration=iteration,
            prompts=tuple(row["prompt"] for row in table),
            tags=tuple(row["tag"] for row in table),
            images=tuple(len(row["scores"][names[0]]) for row in table),
            means={name: torch.stack([_mean(row["scores"][name]) for row in table]) for name in names},
        )

    def paired(self, other: Evaluation) -> bool:
        """Whether both are of the same prompts, with as many images of each."""
        return (self.prompts, self.tags, self.images) == (other.prompts, other.tags, other.images)

    def comparable(self, other: Evaluation) -> bool:
        """Whether both are :meth:`paired` and scored by rewards of the same names."""
        return self.paired(other) and self.means.keys() == other.means.keys()

    def scalars(self, prefix: str) -> dict[str, float]:
        """For the log: ``<prefix>/<reward>``, its ``_stderr``, and ``<prefix>/<reward>/<tag>`` per category."""
        logged: dict[str, float] = {}
        for name in self.means:
            whole = self.estimate(name)
            logged |= {f"{prefix}/{name}": whole.mean, f"{prefix}/{name}_stderr": whole.stderr}
            logged |= {f"{prefix}/{name}/{tag}": self.estimate(name, tag).mean for tag in self.categories}
        return logged

    def state_dict(self) -> dict[str, Any]:
        """Plain values for a checkpoint."""
        return vars(self) | {"means": dict(self.means)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Evaluation:
        return cls(**state)

    def _average(self, values: Tensor, what: Measure) -> Estimate:
        """Of ``values [P]``."""
        if what.balanced:
            return balanced([estimate(values[self._has(tag)]) for tag in self.categories])
        return estimate(values if what.tag is None else values[self._has(what.tag)])

    def _has(self, tag: str) -> Tensor:
        return torch.tensor([t == tag for t in self.tags])


class Tally:
    """Collects scored samples, in any order and any batches, into an :class:`Evaluation`.

    Args:
        category: the key of a prompt's metadata that names its category.
    """

    def __init__(self, category: str = "tag") -> None:
        self._category = category
        self._prompts: dict[int, tuple[str, str]] = {}
        self._scores: dict[int, dict[str, dict[int, float]]] = {}

    def __len__(self) -> int:
        """Prompts seen so far."""
        return len(self._prompts)

    def add(self, samples: Samples, scores: dict[str, Tensor]) -> None:
        """``scores``: reward -> [N] of the samples."""
        for i, prompt in enumerate(samples.rows.prompt.tolist()):
            tag = samples.metadata[i].get(self._category, "")
            self._prompts[prompt] = (samples.prompts[i], tag if isinstance(tag, str) else "")
            image = int(samples.rows.generation[i])
            for name, values in scores.items():
                self._scores.setdefault(prompt, {}).setdefault(name, {})[image] = values[i].item()

    def merge(self, other: Tally) -> None:
        """Take over what another rank collected: other images, maybe of the same prompts."""
        self._prompts |= other._prompts
        for prompt, scores in other._scores.items():
            for name, values in scores.items():
                self._scores.setdefault(prompt, {}).setdefault(name, {}).update(values)

    @classmethod
    def joined(cls, parts: Sequence[Tally]) -> Tally:
        """What all ranks collected."""
        whole = cls()
        for part in parts:
            whole.merge(part)
        return whole

    def table(self) -> list[dict[str, Any]]:
        """A row per prompt, in the order of the file: ``index``, ``prompt``, ``tag`` and ``scores``, reward -> those of its
        images in their order, so that no sum depends on who drew them."""
        return [
            {
                "index": index,
                "prompt": self._prompts[index][0],
                "tag": self._prompts[index][1],
                "scores": {
                    name: [values[image] for image in sorted(values)] for name, values in self._scores[index].items()
                },
            }
            for index in sorted(self._prompts)
        ]

    def evaluation(self, iteration: int) -> Evaluation:
        """What was collected; at least one sample."""
        return Evaluation.of(self.table(), iteration)


def _mean(scores: Sequence[float]) -> Tensor:
    return torch.tensor(scores, dtype=torch.float64).mean()

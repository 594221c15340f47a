"""Held-out scores with honest error bars.

The P prompts of the set are the sample, their images are not: the images of one prompt resemble each other. With
``y_p`` the mean score of prompt p over its images,

    mean = 1/P sum_p y_p,       stderr = s_y / sqrt(P),      s_y^2 = 1/(P - 1) sum_p (y_p - mean)^2,

the standard error clustered by prompt. Before and after training the same prompts are drawn from the same noise, so the
difference is estimated from the pairs, ``d_p = y_p(after) - y_p(before)``, in the same way; what makes some prompts
harder than others cancels. Source: Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640).
"""

from __future__ import annotations

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


def estimate(prompt_means: Tensor) -> Estimate:
    """``y_p [P]`` -> mean and standard error."""
    assert len(prompt_means) > 0
    return Estimate(mean=prompt_means.mean().item(), stderr=_stderr(prompt_means))


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
        return estimate(self._of(reward, tag))

    def change(self, before: Evaluation, reward: str, tag: str | None = None) -> Estimate:
        """Paired difference to an earlier evaluation of the same set."""
        assert self.comparable(before)
        return estimate(self._of(reward, tag) - before._of(reward, tag))

    def comparable(self, other: Evaluation) -> bool:
        """Whether both scored the same prompts, as many images of each, by the same rewards."""
        mine, theirs = ((e.prompts, e.tags, e.images, sorted(e.means)) for e in (self, other))
        return mine == theirs

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

    def _of(self, reward: str, tag: str | None) -> Tensor:
        if tag is None:
            return self.means[reward]
        return self.means[reward][torch.tensor([t == tag for t in self.tags])]


class Tally:
    """Collects scored samples, in any order and any batches, into an :class:`Evaluation`."""

    def __init__(self) -> None:
        self._prompts: dict[int, tuple[str, str]] = {}
        self._scores: dict[int, dict[str, dict[int, float]]] = {}

    def __len__(self) -> int:
        """Prompts seen so far."""
        return len(self._prompts)

    def add(self, samples: Samples, scores: dict[str, Tensor]) -> None:
        """``scores``: reward -> [N] of the samples."""
        for i, prompt in enumerate(samples.rows.prompt.tolist()):
            tag = samples.metadata[i].get("tag", "")
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

    def evaluation(self, iteration: int) -> Evaluation:
        """What was collected; at least one sample."""
        order = sorted(self._prompts)
        names = list(self._scores[order[0]])
        return Evaluation(
            iteration=iteration,
            prompts=tuple(self._prompts[p][0] for p in order),
            tags=tuple(self._prompts[p][1] for p in order),
            images=tuple(len(self._scores[p][names[0]]) for p in order),
            means={n: torch.stack([_mean(self._scores[p][n]) for p in order]) for n in names},
        )


def _mean(scores: dict[int, float]) -> Tensor:
    """Of a prompt's images, in their order, so that no sum depends on who drew them."""
    return torch.tensor([scores[image] for image in sorted(scores)], dtype=torch.float64).mean()

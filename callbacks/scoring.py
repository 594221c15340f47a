"""Call a named reward and say exactly what went wrong if it goes wrong.

A reward fails on a sample if it raises (a wrong number of scores included) or if the score is not finite. A batch on
which it raises is scored again sample by sample, so that the offending samples are known. Only ``Exception`` counts:
an interrupt passes through.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_modules.types import Samples
from rewards.base import Reward


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One failure of a reward."""

    sample: int | None
    """Position of the sample among those scored; ``None`` if a batch failed of which no sample fails alone."""
    reason: str
    cause: Exception | None = None


def score(reward: Reward, samples: Samples, *, name: str, when: str, batch_size: int | None = None) -> Tensor:
    """``[N]`` float64, all finite.

    Args:
        reward: what scores.
        samples: N of them.
        name, when: for the message: the reward's name, and for instance "iteration 3".
        batch_size: samples per call of the reward; ``None``: all.

    Errors: at the first failure a ``ValueError`` (score not finite, wrong number of scores, a ``ValueError`` of the
    reward) or ``RuntimeError`` (anything else) that :func:`describe` words; the reward's own error is its cause.
    """
    scores = _unscored(samples)
    for fault in _run(reward, samples, scores, batch_size):
        kind = ValueError if isinstance(fault.cause, ValueError | None) else RuntimeError
        raise kind(describe(fault, samples, name=name, when=when)) from fault.cause
    return scores


def attempt(reward: Reward, samples: Samples, batch_size: int | None = None) -> tuple[Tensor, list[Fault]]:
    """``[N]`` float64 with NaN where the reward failed, and every failure."""
    scores = _unscored(samples)
    return scores, list(_run(reward, samples, scores, batch_size))


def describe(fault: Fault, samples: Samples, *, name: str, when: str) -> str:
    """One line: the reward, when it failed, on which prompt and image, and why."""
    if fault.sample is None:
        where = f"a batch of prompts such as {samples.prompts[0]!r}, though on none of its samples alone"
    else:
        ids = samples.rows[slice(fault.sample, fault.sample + 1)]
        where = f"prompt {samples.prompts[fault.sample]!r} (prompt {ids.prompt.item()}, image {ids.generation.item()})"
    return f"reward {name!r} failed in {when} on {where}: {fault.reason}"


def select(samples: Samples, chosen: Tensor) -> Samples:
    """Those of the samples where ``chosen [N]`` bool, in order; the same object where that is all of them."""
    if chosen.all():
        return samples
    index = chosen.nonzero().flatten()
    return replace(
        samples,
        images=samples.images[index.to(samples.images.device)],
        prompts=tuple(samples.prompts[k] for k in index.tolist()),
        metadata=tuple(samples.metadata[k] for k in index.tolist()),
        rows=samples.rows[index],
    )


def check_rewards(rewards: Mapping[str, Reward]) -> dict[str, Reward]:
    """The rewards by name. Errors: ``ValueError`` if there is none, or one is no :class:`Reward`."""
    if not rewards:
        raise ValueError("rewards is empty: name at least one, for instance {'brightness': Brightness()}")
    for name, reward in rewards.items():
        if not isinstance(reward, Reward):
            raise ValueError(f"reward {name!r} is a {type(reward).__name__}: give an object of a subclass of Reward")
    return dict(rewards)


def _unscored(samples: Samples) -> Tensor:
    return torch.full((len(samples),), torch.nan, dtype=torch.float64)


def _run(reward: Reward, samples: Samples, scores: Tensor, batch_size: int | None) -> Iterator[Fault]:
    """Fill ``scores`` batch by batch and yield failures as they are found."""
    size = batch_size or max(1, len(samples))
    for start in range(0, len(samples), size):
        yield from _score_part(reward, samples, range(start, min(start + size, len(samples))), scores)


def _score_part(reward: Reward, samples: Samples, part: range, scores: Tensor) -> Iterator[Fault]:
    rows, failure = slice(part.start, part.stop), None
    try:
        values = reward(samples.images[rows], samples.prompts[rows], samples.metadata[rows])
    except Exception as error:
        failure = error
    else:
        scores[rows] = values.where(values.isfinite(), torch.nan)
        for sample, value in zip(part, values.tolist(), strict=True):
            if scores[sample].isnan():
                yield Fault(sample=sample, reason=f"score {value}")
    if failure is not None:
        yield from _faults_within(reward, samples, part, scores, failure)


def _faults_within(
    reward: Reward, samples: Samples, part: range, scores: Tensor, failure: Exception
) -> Iterator[Fault]:
    """Which samples of a failed batch fail alone; the scores of the others are kept."""
    reason = f"{type(failure).__name__}: {failure}"
    if len(part) == 1:
        yield Fault(sample=part[0], reason=reason, cause=failure)
        return
    located = False
    for sample in part:
        for fault in _score_part(reward, samples, range(sample, sample + 1), scores):
            located = True
            yield fault
    if not located:
        yield Fault(sample=None, reason=reason, cause=failure)

"""Score parts of a batch by several requests at a time; a part that fails costs only its own samples."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from rewards.endpoint import EndpointError

Outcome = float | str
"""Of one sample: its score, or why it has none."""


def score_parts(
    call: Callable[[range], Sequence[Outcome]],
    parts: Sequence[range],
    prompts: Sequence[str],
    *,
    workers: int,
    who: str,
) -> Tensor:
    """``[N]`` float64, NaN where a sample has no score; a warning then names the first such sample and the reason.

    Args:
        call: scores the samples of one part; an :class:`EndpointError` is a failure of all of them.
        parts: what to score, together the N samples in order.
        prompts: N of them, for the warning.
        workers: parts under way at a time.
        who: the reward's name in the warning.

    Errors: the first part's :class:`EndpointError` if every part failed so (nothing is lost: nothing was scored); any
    other exception of ``call`` passes through.
    """
    pool = ThreadPoolExecutor(workers)
    try:
        answers = list(pool.map(lambda part: _settle(call, part), parts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interrupt does not wait for the retries of the rest
    failed = [answer for answer in answers if isinstance(answer, EndpointError)]
    if parts and len(failed) == len(parts):
        raise failed[0]
    outcomes: list[Outcome] = []
    for part, answer in zip(parts, answers, strict=True):
        outcomes += [str(answer)] * len(part) if isinstance(answer, EndpointError) else answer
    _warn(outcomes, prompts, who)
    scores = [torch.nan if isinstance(outcome, str) else outcome for outcome in outcomes]
    return torch.tensor(scores, dtype=torch.float64)


def _settle(call: Callable[[range], Sequence[Outcome]], part: range) -> Sequence[Outcome] | EndpointError:
    try:
        return call(part)
    except EndpointError as error:
        return error


def _warn(outcomes: Sequence[Outcome], prompts: Sequence[str], who: str) -> None:
    reasons = [(sample, outcome) for sample, outcome in enumerate(outcomes) if isinstance(outcome, str)]
    if reasons:
        sample, reason = reasons[0]
        warnings.warn(
            f"{who}: no score for {len(reasons)} of {len(outcomes)} samples; the first, prompt {prompts[sample]!r}: {reason}",
            stacklevel=3,
        )

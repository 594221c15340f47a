"""The training reward: every rollout that the LightningModule announces is scored here.

The total reward of a sample is ``sum_k w_k r_k`` over the named rewards; a weight of 0 only monitors. By choice, a
sample that a reward fails on is dropped: its score is NaN and it takes no part in the iteration's advantages.
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from callbacks.scoring import Fault, attempt, check_rewards, describe, score
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.types import PromptBatch, Samples, Scores
from rewards.base import Reward


class RewardScoring(Callback):
    """Score rollouts with frozen rewards.

    Args:
        rewards: by name; the names appear in the log as ``reward/<name>``.
        weights: of every reward, by its name; all 1 by default, 0 = monitored, not trained on.
        batch_size: samples per call of a reward; ``None``: all that are announced together.
        on_error: ``"raise"`` stops the run at the first failure of a reward; ``"drop"`` drops the samples it fails on,
            with a warning.
        max_dropped: with ``"drop"``, the largest share of an iteration's samples that may be dropped, in [0, 1).

    Errors: ``ValueError`` on unusable arguments; in training a ``ValueError`` or ``RuntimeError`` naming the reward, the
    iteration, the prompt and the image.
    """

    def __init__(
        self,
        rewards: dict[str, Reward],
        weights: dict[str, float] | None = None,
        batch_size: int | None = None,
        on_error: Literal["raise", "drop"] = "raise",
        max_dropped: float = 0.5,
    ) -> None:
        self.rewards = check_rewards(rewards)
        self.weights = dict.fromkeys(self.rewards, 1.0) if weights is None else _check_weights(weights, self.rewards)
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give at least 1, or null for all samples at once")
        if on_error not in ("raise", "drop"):
            raise ValueError(f"on_error={on_error!r}: expected 'raise' or 'drop'")
        if not 0 <= max_dropped < 1:
            raise ValueError(f"max_dropped={max_dropped}: expected a share in [0, 1)")
        self.batch_size, self.on_error, self.max_dropped = batch_size, on_error, max_dropped
        self.failures: Counter[str] = Counter()
        """Reward -> samples it failed on so far in this process."""
        self._expected = self._dropped = 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LeanGRPO, batch: PromptBatch, batch_idx: int) -> None:
        self._expected, self._dropped = len(batch) * pl_module.generations_per_prompt, 0

    def on_rollout_end(self, trainer: Trainer, pl_module: LeanGRPO, samples: Samples, scores: Scores) -> None:
        """Fill in ``scores`` for ``samples``: a chunk of groups, or one micro-batch."""
        when = f"iteration {pl_module.iteration}"
        for name, reward in self.rewards.items():
            if name in scores.values:
                raise ValueError(f"two callbacks score a reward named {name!r}: rename one")
            scores.weights[name] = self.weights[name]
            scores.values[name] = self._score(name, reward, samples, when)
        self._check_dropped(samples, scores, when)

    def _score(self, name: str, reward: Reward, samples: Samples, when: str) -> Tensor:
        if self.on_error == "raise":
            return score(reward, samples, name=name, when=when, batch_size=self.batch_size)
        values, faults = attempt(reward, samples, self.batch_size)
        if faults:
            self._warn(name, faults, samples, when)
        return values

    def _warn(self, name: str, faults: list[Fault], samples: Samples, when: str) -> None:
        count = sum(fault.sample is not None for fault in faults)
        self.failures[name] += count
        warnings.warn(
            f"{describe(faults[0], samples, name=name, when=when)}; no score for {count} of {len(samples)} samples "
            f"({self.failures[name]} so far)",
            stacklevel=2,
        )

    def _check_dropped(self, samples: Samples, scores: Scores, when: str) -> None:
        """Stop the iteration before its update once too many of its samples are lost."""
        missing = sum(scores.values[name].isnan() for name, weight in self.weights.items() if weight)
        assert isinstance(missing, Tensor)
        self._dropped += int((missing > 0).sum())
        if self._dropped > self.max_dropped * self._expected:
            raise ValueError(
                f"{self._dropped} of the {self._expected} samples of {when} have no reward, more than max_dropped="
                f"{self.max_dropped} allows: repair the reward (the warnings above say why it fails), or raise max_dropped"
            )


def _check_weights(weights: Mapping[str, Any], rewards: Mapping[str, Reward]) -> dict[str, float]:
    if weights.keys() != rewards.keys():
        unknown, missing = sorted(weights.keys() - rewards.keys()), sorted(rewards.keys() - weights.keys())
        raise ValueError(
            f"weights must name every reward once (unknown: {unknown}, missing: {missing}); 0 only monitors a reward"
        )
    if not all(math.isfinite(weight) for weight in weights.values()):
        raise ValueError(f"weights {dict(weights)}: expected finite numbers")
    if not any(weights.values()):
        raise ValueError(f"weights {dict(weights)} are all 0: give at least one reward another weight to train on")
    return {name: float(weight) for name, weight in weights.items()}

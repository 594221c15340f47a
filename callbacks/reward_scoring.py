"""The training reward: every rollout that the LightningModule announces is scored here.

Several rewards have a weight each; the module's ``advantage`` says how they become one number. A weight of 0 only monitors:
such a reward stops nothing. By choice, a sample that a weighted reward fails on is dropped: its score is NaN and it takes no
part in the iteration's advantages. A reward with a route judges only the prompts that take it (:mod:`callbacks.routing`).
"""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor

from callbacks.parking import parkable, parked
from callbacks.routing import Condition, check_routes, matches, unserved
from callbacks.scoring import Fault, attempt, check_rewards, describe, score, select
from datamodules.prompt_data import PromptDataModule
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.types import PromptBatch, Samples, Scores
from rewards.base import Reward
from rewards.check import check_reward


class RewardScoring(Callback):
    """Score rollouts with frozen rewards.

    When ``fit`` starts, every rank loads every reward, so that a missing file or server loses no work; the failure of one
    that is only monitored is a warning. Scores are computed outside the trainer's autocast.

    Args:
        rewards: by name; the names appear in the log as ``reward/<name>``.
        weights: of every reward, by its name; all 1 by default, 0 = monitored, not trained on.
        batch_size: samples per call of a reward; ``None``: all that are announced together.
        on_error: ``"raise"`` stops the run at the first failure of a weighted reward; ``"drop"`` drops the samples it fails
            on, with a warning.
        max_dropped: with ``"drop"``, the largest share of an iteration's samples, on all ranks, that may be dropped, in
            [0, 1).
        routes: reward -> metadata key -> list of values, ``"present"`` or ``"absent"``: the prompts it judges; a reward
            without a route judges all.
        check: before training, also put every weighted reward to the test of ``rewards.check``.
        offload: the policy and the rewards need not be on the device together: while rewards score, the policy's weights
            wait on the CPU (unless they are sharded), and at other times the rewards do. Costs two transfers of the policy
            per scoring, which streaming Reweight has one of per micro-batch.
        overlap: score in the background while the next groups of the iteration are rolled out: for rewards that run
            elsewhere or on the CPU. What is held for two chunks of groups is alive at once. Without effect under streaming
            Reweight, which waits for every reward.

    Errors: ``ValueError`` on unusable arguments, and before the first rollout for a reward that cannot be loaded or a prompt
    that no weighted reward judges; in training a ``ValueError`` or ``RuntimeError`` naming the reward, the iteration, the
    prompt and the image.
    """

    def __init__(
        self,
        rewards: dict[str, Reward],
        weights: dict[str, float] | None = None,
        batch_size: int | None = None,
        on_error: Literal["raise", "drop"] = "raise",
        max_dropped: float = 0.5,
        routes: dict[str, dict[str, Condition]] | None = None,
        check: bool = False,
        offload: bool = False,
        overlap: bool = False,
    ) -> None:
        self.rewards = check_rewards(rewards)
        self.weights = dict.fromkeys(self.rewards, 1.0) if weights is None else _check_weights(weights, self.rewards)
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: give at least 1, or null for all samples at once")
        if on_error not in ("raise", "drop"):
            raise ValueError(f"on_error={on_error!r}: expected 'raise' or 'drop'")
        if not 0 <= max_dropped < 1:
            raise ValueError(f"max_dropped={max_dropped}: expected a share in [0, 1)")
        if offload and overlap:
            raise ValueError("offload and overlap exclude each other: the policy is at work while rewards score")
        self.routes = check_routes(routes or {}, self.rewards)
        self.batch_size, self.on_error, self.max_dropped = batch_size, on_error, max_dropped
        self.check, self.offload, self.overlap = check, offload, overlap
        self.failures: Counter[str] = Counter()
        """Reward -> samples it failed on so far in this process."""
        self._expected = self._dropped = 0
        self._worker: ThreadPoolExecutor | None = None

    @property
    def reward_weights(self) -> dict[str, float]:
        """By name; the module looks here before it trains."""
        return self.weights

    def identities(self) -> dict[str, dict[str, Any]]:
        """By name, what produced the scores, for result files; of a reward that cannot say (its server is gone), why."""
        return {name: _identity(reward) for name, reward in self.rewards.items()}

    # before and after training

    def on_fit_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        _check_prompts(trainer)
        pl_module.ranks.share(partial(self._load, pl_module.device), "the loading of the rewards")
        if self.overlap:
            self._worker = ThreadPoolExecutor(1, "rewards", initializer=_use, initargs=(pl_module.device,))
            pl_module.chunks_ahead = 1

    def teardown(self, trainer: Trainer, pl_module: LeanGRPO, stage: str) -> None:
        self._stop_worker(pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LeanGRPO, exception: BaseException) -> None:
        self._stop_worker(pl_module)

    def _stop_worker(self, pl_module: LeanGRPO) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=False, cancel_futures=True)
            self._worker, pl_module.chunks_ahead = None, 0

    def _load(self, device: torch.device) -> None:
        for name, reward in self.rewards.items():
            try:
                reward.load()
                if self.check and self.weights[name]:
                    check_reward(reward, tolerance=_tolerance(reward), device=str(device))
            except Exception as error:
                if self.weights[name]:
                    raise ValueError(f"reward {name!r} cannot be used: {error}") from error
                warnings.warn(f"reward {name!r} cannot be used, and is only monitored: {error}", stacklevel=2)
            finally:
                self._step_aside(reward)

    # an iteration

    def on_train_batch_start(self, trainer: Trainer, pl_module: LeanGRPO, batch: PromptBatch, batch_idx: int) -> None:
        self._expected, self._dropped = len(batch) * pl_module.generations_per_prompt, 0

    def on_rollout_end(self, trainer: Trainer, pl_module: LeanGRPO, samples: Samples, scores: Scores) -> None:
        """Fill in ``scores`` for ``samples``: a chunk of groups, or one micro-batch."""
        for name in self.rewards:
            if name in scores.values or name in scores.weights:
                raise ValueError(f"two callbacks score a reward named {name!r}: rename one")
            scores.weights[name], scores.applies[name] = self.weights[name], self._meant_for(name, samples)
        fill_in = partial(self._fill_in, samples, scores, f"iteration {pl_module.iteration}")
        if self._worker is not None:
            scores.pending.append(self._worker.submit(fill_in).result)
            return
        with parked(pl_module.policy) if self.offload and parkable(pl_module.policy) else nullcontext():
            fill_in()

    def on_scores(self, trainer: Trainer, pl_module: LeanGRPO, totals: Tensor) -> None:
        """``totals [n]``: total rewards of the iteration so far, of all ranks; NaN = dropped."""
        self._check_dropped(int(totals.isnan().sum()), f"iteration {pl_module.iteration}")

    def _meant_for(self, name: str, samples: Samples) -> Tensor:
        """[N] bool."""
        return torch.tensor([matches(self.routes.get(name, {}), row) for row in samples.metadata], dtype=torch.bool)

    def _fill_in(self, samples: Samples, scores: Scores, when: str) -> None:
        lost = torch.zeros(len(samples), dtype=torch.bool)
        for name, reward in self.rewards.items():
            applies = scores.applies[name]
            values = torch.full((len(samples),), torch.nan, dtype=torch.float64)
            if applies.any():
                values[applies] = self._score(name, reward, select(samples, applies), when)
            scores.values[name] = values
            if self.weights[name]:
                lost |= applies & values.isnan()
        self._dropped += int(lost.sum())
        self._check_dropped(self._dropped, when)

    def _score(self, name: str, reward: Reward, samples: Samples, when: str) -> Tensor:
        try:
            with torch.autocast(samples.images.device.type, enabled=False), torch.autocast("cpu", enabled=False):
                if self.weights[name] and self.on_error == "raise":
                    return score(reward, samples, name=name, when=when, batch_size=self.batch_size)
                return self._attempt(name, reward, samples, when)
        finally:
            self._step_aside(reward)

    def _attempt(self, name: str, reward: Reward, samples: Samples, when: str) -> Tensor:
        try:
            reward.load()  # what fails here would fail on every sample
        except Exception as error:
            values = torch.full((len(samples),), torch.nan, dtype=torch.float64)
            faults = [Fault(sample=k, reason=f"{type(error).__name__}: {error}") for k in range(len(samples))]
        else:
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

    def _step_aside(self, reward: Reward) -> None:
        if self.offload:
            reward.to("cpu")

    def _check_dropped(self, dropped: int, when: str) -> None:
        """Stop the iteration before its update once too many of its samples are lost."""
        if self.on_error == "drop" and dropped > self.max_dropped * self._expected:
            raise ValueError(
                f"{dropped} of the {self._expected} samples of {when} have no reward, more than max_dropped="
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


def _check_prompts(trainer: Trainer) -> None:
    """``ValueError`` if the prompts are known and one is judged by no weighted reward of any scoring callback."""
    data = getattr(trainer, "datamodule", None)
    if not isinstance(data, PromptDataModule):
        return
    callbacks: list[Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
    scorers = [callback for callback in callbacks if isinstance(callback, RewardScoring)]
    routes = [scorer.routes.get(name) for scorer in scorers for name, weight in scorer.weights.items() if weight]
    prompts = data.prompts("train")
    missed = unserved([prompt.metadata for prompt in prompts], routes)
    if missed:
        raise ValueError(
            f"{len(missed)} of {len(prompts)} training prompts are judged by no weighted reward, the first is "
            f"{prompts[missed[0]].text!r} with metadata {prompts[missed[0]].metadata}: widen a route, or remove them"
        )


def _use(device: torch.device) -> None:
    """The device of a new thread, which would begin with the first one."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def _identity(reward: Reward) -> dict[str, Any]:
    try:
        return reward.identity()
    except Exception as error:
        return {"class": f"{type(reward).__module__}.{type(reward).__qualname__}", "error": str(error)}


def _tolerance(reward: Reward) -> float:
    """For scores that should be equal: wider for a network that computes in half precision."""
    return 1e-2 if getattr(reward, "dtype", None) in (torch.bfloat16, torch.float16) else 1e-5

"""Backpropagate each trained step at once with unit advantage, scale by the advantage afterwards.

The gradient is linear in the advantage: ``sum_i A_i g_i`` with ``g_i = sum_t -w_t grad log p_t`` of sample i, which
needs no reward. So the graph of a step lives only until its own backward, and what is held is one gradient per sample
(LeanGRPO, arXiv 2609.03528, section 3), never synchronised before it is corrected.

**Streaming.** Where the advantage is affine in the reward, ``A_i = (r_i - mean) s``, two sums per open group suffice:

    S0 = sum_i g_i,   S1 = sum_i (r_i - c) g_i,   sum_i A_i g_i = s (S1 - (mean - c) S0)

with ``c`` the group's first reward, so that neither sum cancels a large common offset. Several rewards that are normalised
apart, ``A_i = sum_k s_k (r_ik - mean_k)``, have one S1 and one c each and share S0. Memory no longer depends on the number
of generations, but on the rows of a micro-batch, each of which holds its ``g_i`` until the micro-batch is scored.

Trained steps run sample by sample: b backwards through one batched graph would each pay for the whole batch. A small
model, which one sample does not fill the machine with, is therefore slower under Reweight than under Native.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.advantages import Advantages
from lightning_modules.flow.denoise import denoise
from lightning_modules.parallel.gradients import Gradient
from lightning_modules.schedules.base import Context, Schedule
from lightning_modules.types import Request, Rollout, Step


@dataclass(frozen=True, kw_only=True)
class ReweightRollout(Rollout):
    unit_gradients: list[Gradient] = field(default_factory=list)
    """one per row, until it is scaled or folded."""

    def release(self) -> None:
        super().release()
        self.unit_gradients.clear()


@dataclass(kw_only=True)
class OpenGroup:
    """The sums of a group whose rewards are still coming in."""

    first: list[float]
    """[K] c_k."""
    s0: Gradient
    s1: list[Gradient]
    """[K]"""


class Reweight(Schedule):
    """Scale unit gradients afterwards.

    Args:
        storage: ``"per_sample"`` (one gradient per sample), ``"streaming"`` (two per open group, and one per row of the
            micro-batch at hand), or ``"auto"``: streaming wherever it is certain to be exact. Decided when training starts,
            never in mid-run.
    """

    mixes_samples_late = True

    def __init__(self, storage: Literal["per_sample", "streaming", "auto"] = "auto") -> None:
        if storage not in ("per_sample", "streaming", "auto"):
            raise ValueError(f"storage={storage!r}: expected 'per_sample', 'streaming' or 'auto'")
        self.storage = storage
        self._open: dict[int, OpenGroup] = {}

    def bind(self, context: Context) -> None:
        affine = context.advantage.is_affine(context.generations, context.reward_weights)
        if self.storage == "streaming" and not affine:
            advantage, weights = context.advantage, context.reward_weights
            rewards = "unknown weights" if weights is None else f"weights {', '.join(f'{w:g}' for w in weights)}"
            several = "" if advantage.combine == "sum" else f", combine: {advantage.combine} and rewards of {rewards}"
            raise ValueError(
                f"storage: streaming is exact only where the advantage is affine in the reward, but a clip at "
                f"{advantage.clip} can fire for groups of {context.generations} with std: {advantage.std}{several}; set the "
                "advantage's clip: null, or std: group with few enough generations and small enough weights, or Reweight with "
                "storage: per_sample"
            )
        self.streaming = affine and self.storage != "per_sample"
        super().bind(context)

    @property
    def wants_rewards_early(self) -> bool:  # type: ignore[override]
        return self.streaming

    def begin(self, normaliser: int) -> None:
        super().begin(normaliser)
        self._open.clear()

    def release(self) -> None:
        super().release()
        self._open.clear()

    def rollout(self, request: Request) -> ReweightRollout:
        unit = [self.context.gradients.buffer() for _ in range(len(request))]
        steps: list[Step] = []

        def advance(step: int, index: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
            count = request.trained_calls(step)
            rows = [self._one_row(request, step, index, latents, noise, k, unit) for k in range(count)]
            after, log_prob = torch.cat([a for a, _ in rows]), torch.cat([p for _, p in rows])
            steps.append(Step(step=step, index=index, latents=latents, next_latents=after, log_prob=log_prob))
            return after

        latents = denoise(self.context.process, request, advance)
        return ReweightRollout(request=request, latents=latents, steps=steps, unit_gradients=unit)

    def _one_row(
        self, request: Request, step: int, index: Tensor, latents: Tensor, noise: Tensor, k: int, unit: list[Gradient]
    ) -> tuple[Tensor, Tensor]:
        """Forward and backward row ``k`` of the step's rows -> next latents and log-prob of that row, detached; of none
        past the last row."""
        with torch.enable_grad():
            one = slice(k, k + 1)
            after, log_prob, kl = self._transition(request, step, index[one], latents[one], noise[one])
            weight = self.context.step_weights[step].item()
            into = unit[int(index[k])] if k < len(index) else self.context.gradients.buffer()
            self._backward(-weight * log_prob.sum(), len(log_prob), into, retain_graph=kl is not None)
            if kl is not None:
                self._backward(kl.sum() * (self.context.beta / self.normaliser), len(kl), self.kl_total)
        return after, log_prob.detach()

    def absorb(self, rollout: Rollout, rewards: Tensor) -> None:
        assert isinstance(rollout, ReweightRollout)
        if not self.streaming:
            return
        columns = (rewards[:, None] if rewards.ndim == 1 else rewards).tolist()
        for k, (prompt, scores) in enumerate(zip(rollout.request.rows.prompt.tolist(), columns, strict=True)):
            gradient, rollout.unit_gradients[k] = rollout.unit_gradients[k], self.context.gradients.buffer()
            if any(map(math.isnan, scores)):  # dropped
                continue
            group = self._group(prompt, scores)
            group.s0.add_(gradient)
            for score, first, s1 in zip(scores, group.first, group.s1, strict=True):
                if score != first:
                    s1.add_(gradient, score - first)

    def _group(self, prompt: int, scores: list[float]) -> OpenGroup:
        """The open group of a prompt; if there is none yet, one whose c are ``scores``."""
        if prompt not in self._open:
            buffer = self.context.gradients.buffer
            self._open[prompt] = OpenGroup(first=scores, s0=buffer(), s1=[buffer() for _ in scores])
        return self._open[prompt]

    def backward(self, rollouts: Sequence[Rollout], advantages: Advantages) -> None:
        if self.streaming:
            self._close_groups(advantages, self.total)
        else:
            self._scale_samples(rollouts, advantages)
        for rollout in rollouts:
            assert isinstance(rollout, ReweightRollout)
            rollout.unit_gradients.clear()

    def _close_groups(self, advantages: Advantages, into: Gradient) -> None:
        if advantages.clipped:
            raise ValueError(
                f"an advantage was clipped at {self.context.advantage.clip}, which streaming cannot do: more or heavier "
                "rewards were scored than the scoring callbacks announce in reward_weights; use Reweight with storage: per_sample"
            )
        for prompt, terms in advantages.groups.items():
            group = self._open.pop(prompt, None)
            if group is None or all(term.scale == 0.0 for term in terms):
                continue
            offset = 0.0
            for term, first, s1 in zip(terms, group.first, group.s1, strict=True):
                scale = term.scale / self.normaliser
                into.add_(s1, scale)
                offset += scale * (term.mean - first)
            into.add_(group.s0, -offset)

    def _scale_samples(self, rollouts: Sequence[Rollout], advantages: Advantages) -> None:
        for rollout in rollouts:
            assert isinstance(rollout, ReweightRollout)
            rows = rollout.request.rows
            for value, gradient in zip(
                advantages.of(rows.prompt, rows.generation).tolist(), rollout.unit_gradients, strict=True
            ):
                if value != 0.0:
                    self.total.add_(gradient, value / self.normaliser)
                gradient.clear()

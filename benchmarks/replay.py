"""Schedules that follow a recorded trajectory, so that their gradients can be compared on the very same transitions.

Left to itself a low-precision rollout drifts: a policy call on one row and on a batch round differently, and each step
starts where the last one ended. A :class:`Tape` fixes both ends of every trained transition; the schedule still makes
its own policy calls, log-probabilities and backwards, where and in the batches it always does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_modules.schedules.base import Schedule
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.types import Request, Rollout, Rows, Step


@dataclass(frozen=True, kw_only=True)
class Tape:
    """Recorded trained transitions by (prompt, generation, step); NaN where a row does not train a step."""

    latents: Tensor
    """``[B, M, T, *latent]``, x_t as stored."""
    next_latents: Tensor
    """``[B, M, T, *latent]``, x_{t+1} as stored."""

    @staticmethod
    def record(rollouts: Sequence[Rollout]) -> Tape:
        """From rollouts that hold every (prompt, generation) of an iteration once."""
        prompts = 1 + max(int(r.request.rows.prompt.max()) for r in rollouts)
        generations = 1 + max(int(r.request.rows.generation.max()) for r in rollouts)
        first = rollouts[0]
        latents = first.latents.new_full(
            (prompts, generations, first.request.trained.shape[1], *first.latents.shape[1:]), torch.nan
        )
        tape = Tape(latents=latents, next_latents=latents.clone())
        for rollout in rollouts:
            for step in rollout.steps:
                rows = rollout.request.rows[step.index]
                tape.latents[rows.prompt, rows.generation, step.step] = step.latents
                tape.next_latents[rows.prompt, rows.generation, step.step] = step.next_latents
        return tape

    def ends(self, step: int, rows: Rows) -> tuple[Tensor, Tensor]:
        """x_t and x_{t+1} of some rows, ``[n, *latent]`` each."""
        where = rows.prompt, rows.generation, step
        return self.latents[where], self.next_latents[where]


class _Replay(Schedule):
    """Mix-in: a trained step scores the recorded transition in place of a drawn one, whatever led up to it."""

    tape: Tape

    def on(self, tape: Tape) -> Schedule:
        self.tape = tape
        return self

    def rollout(self, request: Request) -> Rollout:
        rollout = super().rollout(request)  # type: ignore[safe-super]
        for k, step in enumerate(rollout.steps):
            before, _ = self.tape.ends(step.step, request.rows[step.index])
            rollout.steps[k] = replace(step, latents=before)
        return rollout

    def _transition(
        self, request: Request, step: int, index: Tensor, latents: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        before, after = self.tape.ends(step, request.rows[index])
        unscored = before.new_full((len(index),), torch.nan)
        recorded = Step(step=step, index=index, latents=before, next_latents=after, log_prob=unscored)
        log_prob, kl = self._rescore(request, recorded)
        return after, log_prob, kl


class ReplayedNative(_Replay, Native): ...


class ReplayedRetain(_Replay, Retain): ...


class ReplayedReweight(_Replay, Reweight): ...

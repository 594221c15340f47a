"""Roll out with gradients on, keep the graph of every trained step, backpropagate once the rewards are known.

Memory grows with activations x trained steps x samples held. Backward runs per step in Native's order, which makes the
gradient Native's bit for bit where the kernels are deterministic; and since the advantage is known by then, what has
advantage zero costs no backward (LeanGRPO, arXiv 2609.03528, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_modules.advantages import Advantages
from lightning_modules.flow.denoise import denoise
from lightning_modules.objectives.surrogate import on_policy_surrogate
from lightning_modules.schedules.base import Schedule
from lightning_modules.types import Request, Rollout, Step


class Retain(Schedule):
    """Keep the graphs."""

    def rollout(self, request: Request) -> Rollout:
        steps: list[Step] = []

        @torch.enable_grad()
        def advance(step: int, index: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
            after, log_prob, kl = self._transition(request, step, index, latents, noise)
            steps.append(Step(step=step, index=index, latents=latents, next_latents=after, log_prob=log_prob, kl=kl))
            return after

        return Rollout(request=request, latents=denoise(self.context.process, request, advance), steps=steps)

    def backward(self, rollouts: Sequence[Rollout], advantages: Advantages) -> None:
        for rollout in rollouts:
            for k, step in enumerate(rollout.steps):
                coefficient = self._coefficient(rollout, step, advantages)
                if not self._idle(rollout, step, coefficient, advantages):
                    self._accumulate(on_policy_surrogate(step.log_prob, coefficient), step.kl)
                rollout.steps[k] = step.detached()
                self._after_step()

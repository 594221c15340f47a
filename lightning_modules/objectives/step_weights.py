"""Weights ``w_t`` of the denoising steps in the policy loss. They depend on the grid alone, so they are known at the
rollout and exact under every schedule. The mean over the steps that can be trained is 1: weights shift emphasis, not
the learning rate.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_modules.flow.transitions import Transition


class StepWeights(ABC):
    @abstractmethod
    def raw(self, transition: Transition, sigmas: Tensor) -> Tensor:
        """``[T]`` float64 unnormalised weights."""

    def __call__(self, transition: Transition, sigmas: Tensor, candidates: Tensor) -> Tensor:
        """``sigmas [T + 1]``, ``candidates [T]`` bool (steps that can be trained) -> ``[T]`` float64 weights, mean 1
        over the candidates and 0 elsewhere."""
        raw = self.raw(transition, sigmas)
        used = raw[candidates]
        if not (used.isfinite().all() and (used > 0).all()):
            bad = candidates.nonzero().flatten()[~(used.isfinite() & (used > 0))].tolist()
            raise ValueError(
                f"{type(self).__name__} has no weight for step(s) {bad}, which {type(transition).__name__} makes "
                "deterministic; choose a window without them"
            )
        weights = raw.new_zeros(len(raw))
        weights[candidates] = used / used.mean()
        return weights


class ConstantStepWeights(StepWeights):
    """Every step counts the same (FlowGRPO, DanceGRPO)."""

    def raw(self, transition: Transition, sigmas: Tensor) -> Tensor:
        return sigmas.new_ones(len(sigmas) - 1).double()


class InverseSensitivity(StepWeights):
    """``1 / lambda_t``: undoes the factor by which the log-probability's gradient differs between steps (temporal
    gradient rectification, Flash-GRPO, arXiv 2605.15980). Without it the last, least noisy steps dominate the update."""

    def raw(self, transition: Transition, sigmas: Tensor) -> Tensor:
        return 1.0 / transition.sensitivity(sigmas)

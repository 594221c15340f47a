"""The baseline: sample without gradients, then run the policy again on the trained steps.

FlowGRPO (arXiv 2505.05470) and DanceGRPO (arXiv 2505.07818) work this way. It costs ``|S|`` extra forwards per sample
and is the only one of the three that is exact after the policy has moved, so it may take several optimizer steps per
rollout, with the true ratio and clip.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.advantages import Advantages
from lightning_modules.flow.denoise import denoise
from lightning_modules.objectives.surrogate import clipped_surrogate
from lightning_modules.schedules.base import Context, Schedule, ratio_deviation
from lightning_modules.telemetry import Tally
from lightning_modules.types import Request, Rollout, Step


class Native(Schedule):
    """Recompute with gradients.

    Args:
        updates_per_rollout: optimizer steps per rollout.
        samples_per_update: ``"part"``: each step trains on its own share of the micro-batches (FlowGRPO's two, MixGRPO's
            four updates), which depends on the number of processes unless it comes out even; ``"all"``: every step trains
            on all of them.
        micro_batch: rows per forward with gradients; ``None``: as rolled out, which makes the first ratio exactly 1.
    """

    lean = False

    def __init__(
        self,
        updates_per_rollout: int = 1,
        samples_per_update: Literal["part", "all"] = "part",
        micro_batch: int | None = None,
    ) -> None:
        if updates_per_rollout < 1:
            raise ValueError(f"updates_per_rollout={updates_per_rollout}: expected at least 1")
        if samples_per_update not in ("part", "all"):
            raise ValueError(f"samples_per_update={samples_per_update!r}: expected 'part' or 'all'")
        if micro_batch is not None and micro_batch < 1:
            raise ValueError(f"micro_batch={micro_batch}: expected at least 1, or null for the rollout's")
        self.updates_per_rollout = updates_per_rollout
        self.samples_per_update = samples_per_update
        self.micro_batch = micro_batch

    def bind(self, context: Context) -> None:
        super().bind(context)
        self.ratio_deviation: dict[int, float] = {}
        self.clipped = self.scored = 0

    def rollout(self, request: Request) -> Rollout:
        steps: list[Step] = []

        @torch.no_grad()
        def advance(step: int, index: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
            after, log_prob, _ = self._transition(request, step, index, latents, noise)
            steps.append(Step(step=step, index=index, latents=latents, next_latents=after, log_prob=log_prob))
            return after

        return Rollout(request=request, latents=denoise(self.context.process, request, advance), steps=steps)

    def updates(self, rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout]]:
        count, whole, rows = self.updates_per_rollout, self.normaliser, _round_rows(rollouts)
        if count == 1 or self.samples_per_update == "all":
            parts = [rollouts] * count
        elif len(rollouts) < count:
            raise ValueError(
                f"updates_per_rollout={count} but an iteration has only {len(rollouts)} micro-batch(es) to share out; "
                "lower model.micro_batch, or set samples_per_update: all"
            )
        else:
            parts = [rollouts[len(rollouts) * k // count : len(rollouts) * (k + 1) // count] for k in range(count)]
        self.ratio_deviation.clear()
        for part in parts:
            self.begin(whole * _round_rows(part) // rows)
            yield part

    def begin(self, normaliser: int) -> None:
        super().begin(normaliser)
        self.clipped = self.scored = 0

    def backward(self, rollouts: Sequence[Rollout], advantages: Advantages) -> None:
        for rollout in rollouts:
            for step in rollout.steps:
                rows = rollout.request.trained_calls(step.step)
                size = self.micro_batch or rows
                for start in range(0, rows, size):
                    self._recompute(rollout, step.slice(start, start + size), advantages)
                self._after_step()

    def _recompute(self, rollout: Rollout, step: Step, advantages: Advantages) -> None:
        coefficient = self._coefficient(rollout, step, advantages)
        if self._idle(rollout, step, coefficient, advantages):
            return
        with torch.enable_grad():
            log_prob, kl = self._rescore(rollout.request, step)
            loss, ratio = clipped_surrogate(log_prob, step.log_prob, coefficient, self.context.clip_range)
            self._accumulate(loss, kl)
        deviation = ratio_deviation(log_prob.detach(), step.log_prob)
        self.ratio_deviation[step.step] = max(deviation, self.ratio_deviation.get(step.step, 0.0))
        self.clipped += int(((ratio - 1).abs() > self.context.clip_range).sum())
        self.scored += len(ratio)

    def tally(self) -> Tally:
        largest = {f"ratio_deviation/step_{t}": d for t, d in sorted(self.ratio_deviation.items())}
        return super().tally() + Tally(means={"clipped_share": (self.clipped, self.scored)}, largest=largest)


def _round_rows(rollouts: Sequence[Rollout]) -> int:
    """Rows of these micro-batches on all ranks."""
    return sum(rollout.request.round_rows for rollout in rollouts)

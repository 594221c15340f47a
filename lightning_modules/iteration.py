"""The books of one iteration: who is rolled out when, what was scored, what it cost."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lightning_modules.advantages import Advantages, GroupAdvantage
from lightning_modules.schedules.base import Schedule
from lightning_modules.telemetry import Stopwatch, peak_memory_mib
from lightning_modules.types import PromptBatch, Rollout, Rows, Samples, Scores


class Iteration:
    """The running books of one iteration: who is rolled out when, what was scored, what it cost."""

    def __init__(self, batch: PromptBatch, *, generations: int, device: torch.device) -> None:
        self.batch, self.generations, self.device = batch, generations, device
        self.rollouts: list[Rollout] = []
        self.clock = Stopwatch(device)
        self.norms: list[tuple[float, float]] = []
        self.verified: dict[int, float] = {}
        self.rows = {"forward": 0, "backward": 0}
        self._scored: list[tuple[Rows, dict[str, Tensor], Tensor]] = []
        self._schedule_metrics: dict[str, float] = {}

    def chunks(self, groups: int) -> Iterator[Rows]:
        """The rows of ``groups`` prompts at a time, group by group."""
        for start in range(0, len(self.batch), groups):
            prompts = torch.arange(start, min(start + groups, len(self.batch)))
            yield Rows(
                prompt=prompts.repeat_interleave(self.generations),
                generation=torch.arange(self.generations).repeat(len(prompts)),
            )

    def samples(self, rows: Rows, images: Tensor) -> Samples:
        prompts = rows.prompt.tolist()
        return Samples(
            images=images,
            prompts=tuple(self.batch.prompts[p] for p in prompts),
            metadata=tuple(self.batch.metadata[p] for p in prompts),
            rows=rows,
        )

    def record(self, samples: Samples, scores: Scores) -> Tensor:
        """Check and keep what the scorers filled in -> total reward ``[n]``."""
        if not any(scores.weights.get(name, 1.0) for name in scores.values):
            raise ValueError(
                "no callback scored the rollout: add callbacks.RewardScoring with at least one weighted reward"
            )
        total = torch.zeros(len(samples), dtype=torch.float64)
        for name, values in scores.values.items():
            if values.shape != total.shape or values.isinf().any():
                raise ValueError(
                    f"reward {name!r} gave scores of shape {tuple(values.shape)} for {len(samples)} samples (infinite: "
                    f"{int(values.isinf().sum())}); give one finite score per sample, or NaN to drop it"
                )
            weight = scores.weights.get(name, 1.0)
            if weight:
                total += weight * values
        if total.isinf().any():
            raise ValueError("the weighted sum of the rewards overflows float64: scale the rewards down")
        self._scored.append((samples.rows, dict(scores.values), total))
        return total

    def advantages(self, estimator: GroupAdvantage, chunk: Rows | None = None) -> Advantages:
        """Of the chunk's groups, or of all the iteration's."""
        rows, total = self._rows(), self._totals()
        known = torch.isin(rows.prompt, (rows if chunk is None else chunk).prompt)
        return estimator(total[known], rows.prompt[known], rows.generation[known])

    def total_rewards(self) -> Tensor:
        """Of all samples scored, NaN = dropped. Errors: ``ValueError`` if none is left; a single group may be lost whole."""
        total = self._totals()
        if total.isnan().all():
            raise ValueError(
                f"every sample of iteration {self.batch.iteration} was dropped: no reward gave a finite score"
            )
        return total

    def count_rows(self, schedule: Schedule) -> None:
        self.rows["forward"] += schedule.forward_rows
        self.rows["backward"] += schedule.backward_rows
        self._schedule_metrics = schedule.metrics()

    def release(self) -> None:
        for rollout in self.rollouts:
            rollout.release()
        self.rollouts.clear()

    def record_norm(self, before: float, after: float) -> None:
        """Gradient norm of one update, before and after clipping."""
        self.norms.append((before, after))

    def metrics(self, estimator: GroupAdvantage) -> dict[str, float]:
        """Scalars of the iteration, by the names the README's table explains."""
        total, rows = self.total_rewards(), self._rows()
        valid = total.isfinite()
        advantages = estimator(total, rows.prompt, rows.generation)
        values = advantages.of(rows.prompt, rows.generation)[valid] * estimator.final_scale(total)
        zero = sum(form.scale == 0.0 for form in advantages.groups.values())
        metrics = {
            "reward": total[valid].mean().item(),
            "reward_group_std": _group_std(total, rows),
            "advantage/abs_mean": values.abs().mean().item(),
            "advantage/max": values.abs().max().item(),
            "advantage/zero_groups": zero / len(advantages.groups),
            "dropped_samples": float((~valid).sum()),
            "rows/forward": float(self.rows["forward"]),
            "rows/backward": float(self.rows["backward"]),
            "peak_memory_mib": peak_memory_mib(self.device),
            **self._schedule_metrics,
        }
        for name in self._scored[0][1]:
            scores = torch.cat([s[name] for _, s, _ in self._scored])
            metrics[f"reward/{name}"] = scores[scores.isfinite()].mean().item()
            metrics[f"reward/{name}_group_std"] = _group_std(scores, rows)
        if self.norms:
            metrics["grad_norm"], metrics["grad_norm_clipped"] = max(self.norms)
        if self.verified:
            metrics["verify/ratio_deviation"] = max(self.verified.values())
        return metrics | {f"seconds/{phase}": s for phase, s in self.clock.seconds.items()}

    def _totals(self) -> Tensor:
        return torch.cat([total for _, _, total in self._scored])

    def _rows(self) -> Rows:
        return Rows(
            prompt=torch.cat([r.prompt for r, _, _ in self._scored]),
            generation=torch.cat([r.generation for r, _, _ in self._scored]),
        )


def _group_std(values: Tensor, rows: Rows) -> float:
    """Mean over the groups of the standard deviation within the group (population, finite values only); NaN without
    any finite value."""
    groups = [values[(rows.prompt == p) & values.isfinite()] for p in rows.prompt.unique()]
    stds = [group.std(correction=0) for group in groups if len(group)]
    return torch.stack(stds).mean().item() if stds else torch.nan


def join_samples(samples: list[Samples]) -> Samples:
    return Samples(
        images=torch.cat([s.images for s in samples]),
        prompts=sum((s.prompts for s in samples), ()),
        metadata=sum((s.metadata for s in samples), ()),
        rows=Rows(
            prompt=torch.cat([s.rows.prompt for s in samples]),
            generation=torch.cat([s.rows.generation for s in samples]),
        ),
    )

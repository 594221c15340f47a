"""The books of one iteration: who is rolled out when, what was scored, what it cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.advantages import Advantages, GroupAdvantage
from lightning_modules.parallel.layout import Chunk, Layout, Round
from lightning_modules.telemetry import Stopwatch, Tally, peak_memory_mib
from lightning_modules.types import PromptBatch, Rollout, Rows, Samples, Scores


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Rewards of some samples, as they travel between ranks."""

    rows: Rows
    values: dict[str, Tensor]
    """reward -> [n] float64, NaN = no score."""
    total: Tensor
    """[n] float64 weighted sum; NaN = dropped."""


class Iteration:
    """The running books of one iteration on one rank; what was scored is that of all ranks."""

    def __init__(self, batch: PromptBatch, *, layout: Layout, device: torch.device) -> None:
        self.batch, self.layout, self.device = batch, layout, device
        self.rollouts: list[Rollout] = []
        self.clock = Stopwatch(device)
        self.norms: list[tuple[float, float]] = []
        self.verified: dict[int, float] = {}
        self._tally = Tally()
        self._pending: list[tuple[Round, Rollout]] = []
        self._scored: list[Scored] = []

    def rolled_out(self, part: Round, rollout: Rollout) -> None:
        """This rank has made its share of a round."""
        self.rollouts.append(rollout)
        self._pending.append((part, rollout))

    def samples(self, rows: Rows, images: Tensor) -> Samples:
        prompts = rows.prompt.tolist()
        return Samples(
            images=images,
            prompts=tuple(self.batch.prompts[p] for p in prompts),
            metadata=tuple(self.batch.metadata[p] for p in prompts),
            rows=rows,
        )

    def record(self, scored: Iterable[Scored]) -> None:
        """Keep what was scored, by all ranks; in the order of the samples' ids, so that no sum depends on the layout."""
        self._scored = _in_order([*self._scored, *scored])

    def ready(self, chunk: Chunk) -> tuple[list[Rollout], list[int]]:
        """After a chunk: the rollouts, not handed out before, all of whose round's groups are complete, and the prompts
        whose advantages they need, with those of the groups that this chunk completes."""
        done = [(part, rollout) for part, rollout in self._pending if part.closes <= chunk.stop]
        self._pending = [(part, rollout) for part, rollout in self._pending if part.closes > chunk.stop]
        prompts = set(chunk.closed).union(*(self.layout.prompts_of(part) for part, _ in done))
        return [rollout for _, rollout in done], sorted(prompts)

    def advantages(self, estimator: GroupAdvantage, prompts: Sequence[int] | None = None) -> Advantages:
        """Of the groups of these prompts, or of all the iteration's."""
        rows, total = self._rows(), self._totals()
        known = torch.ones(len(rows), dtype=torch.bool)
        if prompts is not None:
            known = torch.isin(rows.prompt, torch.tensor(prompts))
        return estimator(total[known], rows.prompt[known], rows.generation[known])

    def total_rewards(self) -> Tensor:
        """Of all samples scored, NaN = dropped. Errors: ``ValueError`` if none is left; a single group may be lost whole."""
        total = self._totals()
        if total.isnan().all():
            raise ValueError(
                f"every sample of iteration {self.batch.iteration} was dropped: no reward gave a finite score"
            )
        return total

    def count(self, update: Tally) -> None:
        """Add what one update cost and showed on this rank."""
        self._tally += update

    def release(self) -> None:
        for rollout in self.rollouts:
            rollout.release()
        self.rollouts.clear()
        self._pending.clear()

    def record_norm(self, before: float, after: float) -> None:
        """Gradient norm of one update, before and after clipping."""
        self.norms.append((before, after))

    def tally(self) -> Tally:
        """What the iteration cost and showed on this rank."""
        largest = {"peak_memory_mib": peak_memory_mib(self.device)}
        if self.verified:
            largest["verify/ratio_deviation"] = max(self.verified.values())
        seconds = {f"seconds/{phase}": s for phase, s in self.clock.seconds.items()}
        return self._tally + Tally(largest=largest | seconds)

    def metrics(self, estimator: GroupAdvantage, tallies: Iterable[Tally]) -> dict[str, float]:
        """Scalars of the iteration, by the names the README's table explains. ``tallies``: of every rank."""
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
            **sum(tallies, Tally()).metrics(),
        }
        for name in self._scored[0].values:
            scores = torch.cat([part.values[name] for part in self._scored])
            metrics[f"reward/{name}"] = scores[scores.isfinite()].mean().item()
            metrics[f"reward/{name}_group_std"] = _group_std(scores, rows)
        if self.norms:
            metrics["grad_norm"], metrics["grad_norm_clipped"] = max(self.norms)
        return metrics

    def _totals(self) -> Tensor:
        return torch.cat([part.total for part in self._scored])

    def _rows(self) -> Rows:
        return Rows.joined([part.rows for part in self._scored])


def weigh(samples: Samples, scores: Scores) -> Scored:
    """What the scorers filled in, checked and added up. Errors: ``ValueError`` if nobody scored, or with scores of another
    length or infinite ones."""
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
    return Scored(rows=samples.rows, values=dict(scores.values), total=total)


def _in_order(parts: list[Scored]) -> list[Scored]:
    """One record, its samples ordered by prompt and generation."""
    names = list(dict.fromkeys(name for part in parts for name in part.values))
    rows = Rows.joined([part.rows for part in parts])
    order = rows.order()
    return [
        Scored(
            rows=rows[order],
            values={name: torch.cat([part.values[name] for part in parts])[order] for name in names},
            total=torch.cat([part.total for part in parts])[order],
        )
    ]


def _group_std(values: Tensor, rows: Rows) -> float:
    """Mean over the groups of the standard deviation within the group (population, finite values only); NaN without
    any finite value."""
    groups = [values[(rows.prompt == p) & values.isfinite()] for p in rows.prompt.unique()]
    stds = [group.std(correction=0) for group in groups if len(group)]
    return torch.stack(stds).mean().item() if stds else torch.nan

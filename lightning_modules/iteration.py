"""The books of one iteration: who is rolled out when, what was scored, what it cost."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.advantages import Advantages, GroupAdvantage, Rewards
from lightning_modules.parallel.layout import Chunk, Layout, Round
from lightning_modules.telemetry import Stopwatch, Tally, peak_memory_mib
from lightning_modules.types import PromptBatch, Rollout, Rows, Samples, Scores


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Rewards of some samples, as they travel between ranks."""

    rows: Rows
    values: dict[str, Tensor]
    """reward -> [n] float64, NaN = no score."""
    applies: dict[str, Tensor]
    """reward -> [n] bool, the samples it is meant for."""
    weights: dict[str, float]
    """reward -> its weight; 0 = only monitored."""

    @property
    def rewards(self) -> Rewards:
        """Those that are trained on."""
        names = [name for name, weight in self.weights.items() if weight]
        return Rewards(
            values=torch.stack([self.values[name] for name in names], dim=1),
            applies=torch.stack([self.applies[name] for name in names], dim=1),
            weights=tuple(self.weights[name] for name in names),
        )


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
        self._scored: Scored | None = None

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
        parts = [*([] if self._scored is None else [self._scored]), *scored]
        self._scored = _in_order(parts) if parts else None

    def ready(self, chunk: Chunk) -> tuple[list[Rollout], list[int]]:
        """After a chunk: the rollouts, not handed out before, all of whose round's groups are complete, and the prompts
        whose advantages they need, with those of the groups that this chunk completes."""
        done = [(part, rollout) for part, rollout in self._pending if part.closes <= chunk.stop]
        self._pending = [(part, rollout) for part, rollout in self._pending if part.closes > chunk.stop]
        prompts = set(chunk.closed).union(*(self.layout.prompts_of(part) for part, _ in done))
        return [rollout for _, rollout in done], sorted(prompts)

    def latest(self, chunk: Chunk) -> list[Rollout]:
        """The rollouts of a chunk, not handed out before, whether their groups are complete or not."""
        done = [rollout for part, rollout in self._pending if part.stop <= chunk.stop]
        self._pending = [(part, rollout) for part, rollout in self._pending if part.stop > chunk.stop]
        return done

    def rewards(self, estimator: GroupAdvantage, prompts: Sequence[int]) -> tuple[Rows, Tensor]:
        """What is known so far of these prompts, from all ranks, in order: ids, and ``[n, K]`` what the advantage is affine
        in (NaN = dropped)."""
        known = torch.isin(self._all.rows.prompt, torch.tensor(prompts, dtype=torch.int64))
        return self._all.rows[known], estimator.columns(self._all.rewards[known])

    def advantages(self, estimator: GroupAdvantage, prompts: Sequence[int] | None = None) -> Advantages:
        """Of the groups of these prompts, or of all the iteration's."""
        rows, rewards = self._all.rows, self._all.rewards
        known = torch.ones(len(rows), dtype=torch.bool)
        if prompts is not None:
            known = torch.isin(rows.prompt, torch.tensor(prompts))
        return estimator(rewards[known], rows.prompt[known], rows.generation[known])

    def final_scale(self, estimator: GroupAdvantage) -> float:
        """What the iteration's gradient still lacks. Errors: ``ValueError`` if every sample was dropped."""
        self.total_rewards()
        return estimator.final_scale(self._all.rewards, self._all.rows.prompt)

    @property
    def totals(self) -> Tensor:
        """[n] float64 total rewards of the samples scored so far, on all ranks, by prompt and generation; NaN = dropped."""
        return torch.empty(0, dtype=torch.float64) if self._scored is None else self._scored.rewards.total

    def total_rewards(self) -> Tensor:
        """Of all samples scored, NaN = dropped. Errors: ``ValueError`` if none is left; a single group may be lost whole."""
        total = self.totals
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
        total, rows = self.total_rewards(), self._all.rows
        valid = total.isfinite()
        advantages = self.advantages(estimator)
        values = advantages.of(rows.prompt, rows.generation)[valid] * self.final_scale(estimator)
        zero = sum(all(term.scale == 0.0 for term in terms) for terms in advantages.groups.values())
        metrics = {
            "reward": total[valid].mean().item(),
            "reward_group_std": _group_std(total, rows),
            "advantage/abs_mean": values.abs().mean().item(),
            "advantage/max": values.abs().max().item(),
            "advantage/zero_groups": zero / len(advantages.groups),
            "dropped_samples": float((~valid).sum()),
            **sum(tallies, Tally()).metrics(),
        }
        for name, applies in self._all.applies.items():
            scores = self._all.values[name].where(applies, torch.nan)
            scored, asked = scores[scores.isfinite()], int(applies.sum())
            metrics[f"reward/{name}"] = scored.mean().item()
            metrics[f"reward/{name}_group_std"] = _group_std(scores, rows)
            metrics[f"reward/{name}_dropped_share"] = 1.0 - len(scored) / asked if asked else 0.0
        if self.norms:
            metrics["grad_norm"], metrics["grad_norm_clipped"] = max(self.norms)
        return metrics

    @property
    def _all(self) -> Scored:
        assert self._scored is not None, "nothing was scored yet"
        return self._scored


def weigh(samples: Samples, scores: Scores) -> Scored:
    """What the scorers filled in, checked; waits for those that work in the background, and raises what they raise.

    Errors: ``ValueError`` if nobody scored, or with scores of another length or infinite ones, or a prompt to which no
    weighted reward applies. A reward that is only monitored stops nothing: its scores become NaN, with a warning.
    """
    for wait in scores.pending:
        wait()
    weights = {name: scores.weights.get(name, 1.0) for name in scores.values}
    if not any(weights.values()):
        raise ValueError(
            "no callback scored the rollout: add callbacks.reward_scoring.RewardScoring with at least one weighted reward"
        )
    everywhere = torch.ones(len(samples), dtype=torch.bool)
    applies = {name: scores.applies.get(name, everywhere) for name in weights}
    values = {name: _checked(name, scores.values[name], applies[name], monitored=not weights[name]) for name in weights}
    scored = Scored(rows=samples.rows, values=values, applies=applies, weights=weights)
    unserved = (~scored.rewards.applies.any(dim=1)).nonzero().flatten().tolist()
    if unserved:
        raise ValueError(
            f"no weighted reward applies to the prompt {samples.prompts[unserved[0]]!r}: widen the routes of a reward, or "
            "remove the prompt"
        )
    if scored.rewards.total.isinf().any():
        raise ValueError("the weighted sum of the rewards overflows float64: scale the rewards down")
    return scored


def _checked(name: str, values: Tensor, applies: Tensor, *, monitored: bool) -> Tensor:
    """[n] float64, one finite score or NaN per sample."""
    fits = values.shape == applies.shape
    if fits and not values[applies].isinf().any():
        return values.double()
    fault = (
        f"reward {name!r} gave scores of shape {tuple(values.shape)} for {len(applies)} samples (infinite: "
        f"{int(values.isinf().sum())})"
    )
    if not monitored:
        raise ValueError(f"{fault}; give one finite score per sample, or NaN to drop it")
    warnings.warn(f"{fault}; it is only monitored, and logged as NaN", stacklevel=3)
    nothing = torch.full(applies.shape, torch.nan, dtype=torch.float64)
    return values.double().where(values.isfinite(), nothing) if fits else nothing


def _in_order(parts: list[Scored]) -> Scored:
    """One record, its samples ordered by prompt and generation. Errors: ``ValueError`` if they are not scored alike."""
    weights = parts[0].weights
    if any(part.weights != weights for part in parts):
        raise ValueError(
            f"samples of one iteration were scored by different rewards or weights, {weights} and others: fill in every "
            "reward for all samples, NaN where there is no score"
        )
    rows = Rows.joined([part.rows for part in parts])
    order = rows.order()
    return Scored(
        rows=rows[order],
        values={name: torch.cat([part.values[name] for part in parts])[order] for name in weights},
        applies={name: torch.cat([part.applies[name] for part in parts])[order] for name in weights},
        weights=weights,
    )


def _group_std(values: Tensor, rows: Rows) -> float:
    """Mean over the groups of the standard deviation within the group (population, finite values only); NaN without
    any finite value."""
    groups = [values[(rows.prompt == p) & values.isfinite()] for p in rows.prompt.unique()]
    stds = [group.std(correction=0) for group in groups if len(group)]
    return torch.stack(stds).mean().item() if stds else torch.nan

"""Streaming Reweight whose sums are added up over the ranks as they grow, and held as shards: where weights are sharded
(FSDP2), a rank then holds no gradient of full size from one round to the next, however many generations a group has.

A round is over when all ranks know its rewards. What it gives is added up at once:

- for a group that the round completes the advantages are known: its samples are scaled, and one reduction adds them up;
- of a group that stays open, S0 and each S1 are added up apart, one reduction each. They are corrected when it closes, as
  shards: both are linear in the samples' gradients, so the order of correction and sum is free, provided that every rank
  takes the same ``c``. It is the group's first valid reward on any rank.

So a group of Q rounds costs ``2 (Q - 1) + 1`` reductions, where the local sums of :class:`Reweight` cost one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from lightning_modules.advantages import Advantages
from lightning_modules.parallel.gradients import Gradient
from lightning_modules.schedules.reweight import Reweight, ReweightRollout
from lightning_modules.types import Rollout, Rows


class ReweightSharded(Reweight):
    """Takes no arguments; ``micro_batch`` of the module says how many samples a rank makes per round. Gradients are added up
    after every round, whatever ``sync`` is; under DDP, where the sum of gradients has full size, nothing is saved."""

    wants_rewards_early = False  # type: ignore[assignment]
    wants_every_round = True

    def __init__(self) -> None:
        super().__init__("streaming")

    def fold(self, rollouts: Sequence[Rollout], rows: Rows, rewards: Tensor) -> None:
        valid = ~rewards.isnan().any(dim=1)
        for prompt in rows.prompt.unique().tolist():
            known = (rows.prompt == prompt) & valid
            if not known.any():  # on any rank
                continue
            columns = dict(zip(rows.generation[known].tolist(), rewards[known].tolist(), strict=True))
            group = self._group(prompt, next(iter(columns.values())))
            mine = [(g, columns[m]) for p, m, g in _samples(rollouts) if p == prompt and m in columns]
            self._add_up(((g, 1.0) for g, _ in mine), group.s0)
            for k, (first, s1) in enumerate(zip(group.first, group.s1, strict=True)):
                self._add_up(((g, scores[k] - first) for g, scores in mine), s1)
        still_open = set(rows.prompt.tolist())
        for prompt, _, gradient in _samples(rollouts):
            if prompt in still_open:
                gradient.clear()

    def backward(self, rollouts: Sequence[Rollout], advantages: Advantages) -> None:
        self._close_groups(advantages, self.reduced)
        for prompt, generation, gradient in _samples(rollouts):
            if prompt in advantages.groups:
                value = advantages.table[prompt, generation].item()
                if value != 0.0:
                    self.total.add_(gradient, value / self.normaliser)
                gradient.clear()

    def close(self) -> None:
        if not self.context.advantage.deferred:
            self.total.add_(self.kl_total)
            self.kl_total.clear()
        self._reduce()

    def _add_up(self, terms: Iterable[tuple[Gradient, float]], into: Gradient) -> None:
        """``into += sum of gradient * scale`` over all ranks' terms."""
        here = self.context.gradients.buffer()
        for gradient, scale in terms:
            if scale != 0.0:
                here.add_(gradient, scale)
        into.add_(self.context.gradients.reduce(here))


def _samples(rollouts: Sequence[Rollout]) -> Iterable[tuple[int, int, Gradient]]:
    """(prompt, generation, unit gradient) of each of this rank's samples."""
    for rollout in rollouts:
        assert isinstance(rollout, ReweightRollout)
        rows = rollout.request.rows
        yield from zip(rows.prompt.tolist(), rows.generation.tolist(), rollout.unit_gradients, strict=True)

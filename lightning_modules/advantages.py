"""Group-relative advantages (GRPO): how much better a generation is than the others of its prompt, from one or several
rewards.

For the valid samples i = 1..M of one prompt group, rewards k = 1..K with weights ``w_k``, and ``N(x)_i = (x_i - mean) s``:

============  ==================================================  ====================================================
``combine``   advantage                                           source
============  ==================================================  ====================================================
sum           ``N(sum_k w_k r_k)_i``                              FlowGRPO (arXiv 2505.05470)
advantage     ``sum_k w_k N(r_k)_i``                              MixGRPO (arXiv 2507.21802)
gdpo          ``B_i / (std of B + eps)``, B as of ``advantage``   GDPO (arXiv 2601.05242); std over the iteration
============  ==================================================  ====================================================

each clipped to ``[-a, a]`` at the end. The scale is ``s = 1 / (std + eps)`` with ``std`` taken over the group, over the
whole iteration (``std="global"``; of one reward, over the samples it applies to), or left out (``std="none"``, s = 1).
GDPO also subtracts the mean of B over the iteration, which is 0: the values of each group are centred.

A sample is valid if every reward that applies to its prompt has a finite score; the others are dropped: no advantage, and
no part in any statistic. A reward that does not apply to a prompt adds nothing to that group.

**Affine form.** Without a clip, ``A_i = sum_k s_k (r_ik - mean_k)`` within a group, the weight being part of ``s_k``: what
streaming Reweight relies on (LeanGRPO, arXiv 2609.03528).

Statistics are float64. A reward whose largest and smallest value in a group are equal adds exactly 0 there: that is
tested by ``max == min``, since the rounded mean of equal numbers need not be that number. FlowGRPO: eps 1e-4, population
std (``ddof=0``), clip 5; DanceGRPO (arXiv 2505.07818): ``ddof=1``, eps 1e-8.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

Combine = Literal["sum", "advantage", "gdpo"]
Std = Literal["group", "global", "none"]


@dataclass(frozen=True, kw_only=True)
class Rewards:
    """The weighted rewards of n samples."""

    values: Tensor
    """[n, K] float64; NaN or infinite = no score. Not looked at where a reward does not apply."""
    applies: Tensor
    """[n, K] bool; the same for all generations of a prompt."""
    weights: tuple[float, ...]
    """[K], none of them 0."""

    @staticmethod
    def of(rewards: Tensor | Rewards) -> Rewards:
        """``[n]`` scores as a single reward of weight 1."""
        if isinstance(rewards, Rewards):
            return rewards
        values = rewards.double()[:, None]
        return Rewards(values=values, applies=torch.ones_like(values, dtype=torch.bool), weights=(1.0,))

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: Tensor) -> Rewards:
        return replace(self, values=self.values[rows], applies=self.applies[rows])

    @property
    def valid(self) -> Tensor:
        """[n] bool: every reward that applies has a finite score."""
        return (self.values.isfinite() | ~self.applies).all(dim=1)

    @property
    def total(self) -> Tensor:
        """[n] float64, ``sum_k w_k r_k`` over the rewards that apply; NaN = dropped."""
        total = self.values.new_zeros(len(self))
        for k, weight in enumerate(self.weights):
            total += weight * self.values[:, k].where(self.applies[:, k], 0.0)
        return total.where(self.valid, torch.nan)


@dataclass(frozen=True, kw_only=True)
class Affine:
    """One term of a group's advantage before any clip, ``(r_i - mean) * scale``; ``scale == 0`` if all r_i are equal."""

    mean: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of some closed groups."""

    table: Tensor
    """[B, M] float64 by (prompt position, generation); exactly 0 for dropped samples and groups of equal rewards, NaN
    where no such sample was given."""
    groups: dict[int, tuple[Affine, ...]]
    """prompt position -> its affine form: a term for each column of :meth:`GroupAdvantage.columns`."""
    clipped: bool = False
    """Whether the clip has changed a value, so that the affine form no longer holds."""

    def of(self, prompt: Tensor, generation: Tensor) -> Tensor:
        """[n] advantages of the samples with these ids: looked up, never matched by position."""
        values = self.table[prompt, generation]
        assert values.isfinite().all(), "advantage asked for a sample that was never scored"
        return values


@dataclass(frozen=True, kw_only=True)
class _Group:
    """One group before any clip and batch-normalisation."""

    position: int
    rows: Tensor
    """[n] bool, which of the samples given are its."""
    valid: Tensor
    """[M] bool."""
    values: Tensor
    """[M] float64, exactly 0 where not valid."""
    terms: tuple[Affine, ...]


class GroupAdvantage:
    """The advantage estimator.

    Args:
        std: ``"group"`` (each group's own), ``"global"`` (over the iteration's rewards) or ``"none"``.
        clip: bound ``a`` on ``|A|``, or ``None`` for none.
        eps: added to every standard deviation.
        ddof: 0 (population) or 1 (sample) standard deviation. With ``ddof=1`` a group of one valid reward has std 0.
        combine: how several rewards become one advantage, see the module; with a single reward of weight 1, ``"sum"`` and
            ``"advantage"`` are the same.
    """

    def __init__(
        self,
        std: Std = "group",
        clip: float | None = 5.0,
        eps: float = 1e-4,
        ddof: Literal[0, 1] = 0,
        combine: Combine = "sum",
    ) -> None:
        if std not in get_args(Std):
            raise ValueError(f"std={std!r}: expected 'group', 'global' or 'none'")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip={clip}: expected a positive bound on |advantage|, or null for none")
        if not eps > 0:
            raise ValueError(
                f"eps={eps}: expected a positive number (it guards the division by the standard deviation)"
            )
        if ddof not in (0, 1):
            raise ValueError(f"ddof={ddof}: expected 0 (population) or 1 (sample)")
        if combine not in get_args(Combine):
            raise ValueError(f"combine={combine!r}: expected 'sum', 'advantage' or 'gdpo'")
        self.std, self.clip, self.eps, self.ddof, self.combine = std, clip, eps, ddof, combine

    @property
    def needs_iteration(self) -> bool:
        """Whether no advantage is known, not even up to a common factor, before the iteration's last reward."""
        late = self.std == "global" or self.combine == "gdpo"
        factor_per_reward = self.std == "global" and self.combine != "sum"
        return factor_per_reward or (late and self.clip is not None)

    @property
    def deferred(self) -> bool:
        """Whether groups close without a factor that they have in common and that follows at the end: 1 / (std + eps) of
        the iteration's rewards or, under ``gdpo``, of its advantages."""
        return (self.std == "global" or self.combine == "gdpo") and not self.needs_iteration

    def terms(self, weights: Sequence[float] | None = None) -> int:
        """Terms of the affine form, for rewards with these ``weights`` (``None``: one reward)."""
        return 1 if self.combine == "sum" or not weights else len(weights)

    def is_affine(self, generations: int, weights: Sequence[float] | None = None) -> bool:
        """Whether ``A`` is certain to be affine in the rewards for groups of ``generations``: no clip, or one that cannot
        fire. With the group's std, ``|N(r)| <= sqrt(M - 1)`` (population) or ``(M - 1) / sqrt(M)`` (sample), and
        ``|A| <= sum_k |w_k|`` times that. ``weights``: of the rewards; ``None``: unknown."""
        if self.clip is None:
            return True
        if self.std != "group" or self.combine == "gdpo":
            return False
        if self.combine == "sum":
            size = 1.0
        elif weights is None:
            return False
        else:
            size = math.fsum(map(abs, weights))
        bound = (generations - 1) ** 0.5 if self.ddof == 0 else (generations - 1) / generations**0.5
        return size * bound <= self.clip

    def columns(self, rewards: Tensor | Rewards) -> Tensor:
        """What the affine form is a function of: ``[n, 1]`` totals under ``sum``, else ``[n, K]`` rewards, 0 where one does
        not apply (which adds nothing, like any value that a whole group has). float64; a row of NaN = dropped."""
        rewards = Rewards.of(rewards)
        if self.combine == "sum":
            return rewards.total[:, None]
        return rewards.values.where(rewards.applies, 0.0).where(rewards.valid[:, None], torch.nan)

    def __call__(self, rewards: Tensor | Rewards, prompt: Tensor, generation: Tensor) -> Advantages:
        """Rewards (``[n]`` scores of a single one, NaN = dropped) and their ids ``[n]``, ``[n]`` -> advantages. Groups must
        be whole.

        Where :attr:`needs_iteration`, the rewards given are the iteration's. Where :attr:`deferred`, the values still lack
        :meth:`final_scale`. Errors: ``ValueError`` if a reward applies to a part of a group.
        """
        rewards = Rewards.of(rewards)
        groups = list(self._groups(rewards, prompt))
        factor = self._batch_factor(groups) if self.combine == "gdpo" and not self.deferred else 1.0
        size = [int(ids.max()) + 1 if len(ids) else 0 for ids in (prompt, generation)]
        table = rewards.values.new_full(size, torch.nan)
        forms, clipped = {}, False
        for group in groups:
            values = group.values * factor
            forms[group.position] = tuple(replace(term, scale=term.scale * factor) for term in group.terms)
            if self.clip is not None:
                clipped |= bool((values.abs() > self.clip * (1 + 1e-9)).any())  # rounding at the bound is no clip
                values = values.clamp(-self.clip, self.clip)
            table[group.position, generation[group.rows]] = values
        return Advantages(table=table, groups=forms, clipped=clipped)

    def final_scale(self, rewards: Tensor | Rewards, prompt: Tensor | None = None) -> float:
        """What the iteration's accumulated policy gradient is still to be multiplied by: 1 unless :attr:`deferred`.

        ``rewards``: all of the iteration's; ``prompt [n]``: their prompts, which only ``gdpo`` asks for.
        """
        if not self.deferred:
            return 1.0
        rewards = Rewards.of(rewards)
        if self.combine == "gdpo":
            assert prompt is not None, "GDPO's factor depends on the groups"
            return self._batch_factor(list(self._groups(rewards, prompt)))
        return self._scale(self.columns(rewards)[:, 0])

    def _groups(self, rewards: Rewards, prompt: Tensor) -> Iterator[_Group]:
        columns = self.columns(rewards)
        weights = (1.0,) if self.combine == "sum" else rewards.weights
        common = self._common_scales(columns, rewards)
        for position in prompt.unique().tolist():
            rows = prompt == position
            if (rewards.applies[rows] != rewards.applies[rows][0]).any():
                raise ValueError(
                    f"a reward applies to some generations of prompt {position} only: a group is compared by the same "
                    "rewards, so decide by the prompt"
                )
            group = columns[rows]
            valid = group.isfinite().all(dim=1)
            parts = [self._term(group[valid, k], weight, common[k]) for k, weight in enumerate(weights)]
            values = torch.zeros(len(group), dtype=columns.dtype)
            values[valid] = torch.stack([value for value, _ in parts]).sum(dim=0)
            yield _Group(position=position, rows=rows, valid=valid, values=values, terms=tuple(t for _, t in parts))

    def _term(self, used: Tensor, weight: float, common: float) -> tuple[Tensor, Affine]:
        """``w N(r)`` of one reward over the valid samples of a group."""
        if len(used) == 0 or used.max() == used.min():
            return torch.zeros_like(used), Affine(mean=used[0].item() if len(used) else 0.0, scale=0.0)
        scale = weight * (self._scale(used) if self.std == "group" else common)
        term = Affine(mean=used.mean().item(), scale=scale)
        return (used - term.mean) * scale, term

    def _common_scales(self, columns: Tensor, rewards: Rewards) -> list[float]:
        """Of each column, the scale that all groups share as far as it is known by now."""
        if self.std != "global" or self.deferred:
            return [1.0] * columns.shape[1]
        if self.combine == "sum":
            return [self._scale(columns[:, 0])]
        return [self._scale(columns[rewards.applies[:, k], k]) for k in range(columns.shape[1])]

    def _batch_factor(self, groups: Sequence[_Group]) -> float:
        """GDPO's: 1 / (std + eps) of the iteration's advantages, whose mean is 0."""
        return self._inverse(torch.cat([group.values[group.valid] for group in groups]))

    def _scale(self, rewards: Tensor) -> float:
        return 1.0 if self.std == "none" else self._inverse(rewards[rewards.isfinite()])

    def _inverse(self, values: Tensor) -> float:
        """``1 / (std + eps)``."""
        std = values.std(correction=self.ddof).item() if len(values) > self.ddof else 0.0
        if std == math.inf:
            raise ValueError(
                f"rewards up to {values.abs().max():.3g} have no finite standard deviation: scale them down"
            )
        return 1.0 / (std + self.eps)

"""Group-relative advantages (GRPO): how much better a generation is than the others of its prompt.

For the valid rewards ``r_1..r_M`` of one prompt group,

    A_i = clip((r_i - mean) * scale, -a, a),   scale = 1 / (std + eps)

with ``std`` taken over the group, over the whole iteration (``std="global"``), or left out (``std="none"``, scale = 1).
Statistics are float64. A group whose largest and smallest reward are equal has advantage exactly 0: that is tested by
``max == min``, since the rounded mean of equal numbers need not be that number.

Sources: FlowGRPO (arXiv 2505.05470): eps 1e-4, population std (``ddof=0``), clip 5; DanceGRPO (arXiv 2505.07818):
``ddof=1``, eps 1e-8; LeanGRPO (arXiv 2609.03528) for the affine form that streaming Reweight relies on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Affine:
    """One group's ``A_i = (r_i - mean) * scale`` before any clip; ``scale == 0`` for a group of equal rewards."""

    mean: float
    scale: float


@dataclass(frozen=True, kw_only=True)
class Advantages:
    """Advantages of some closed groups."""

    table: Tensor
    """[B, M] float64 by (prompt position, generation); exactly 0 for dropped samples and groups of equal rewards, NaN
    where no such sample was given."""
    groups: dict[int, Affine]
    """prompt position -> its affine form."""

    def of(self, prompt: Tensor, generation: Tensor) -> Tensor:
        """[n] advantages of the samples with these ids: looked up, never matched by position."""
        values = self.table[prompt, generation]
        assert values.isfinite().all(), "advantage asked for a sample that was never scored"
        return values


class GroupAdvantage:
    """The advantage estimator.

    Args:
        std: ``"group"`` (each group's own), ``"global"`` (over the iteration's rewards) or ``"none"``.
        clip: bound ``a`` on ``|A|``, or ``None`` for none.
        eps: added to the standard deviation.
        ddof: 0 (population) or 1 (sample) standard deviation. With ``ddof=1`` a group of one valid reward has std 0.
    """

    def __init__(
        self,
        std: Literal["group", "global", "none"] = "group",
        clip: float | None = 5.0,
        eps: float = 1e-4,
        ddof: Literal[0, 1] = 0,
    ) -> None:
        if std not in ("group", "global", "none"):
            raise ValueError(f"std={std!r}: expected 'group', 'global' or 'none'")
        if clip is not None and not clip > 0:
            raise ValueError(f"clip={clip}: expected a positive bound on |advantage|, or null for none")
        if not eps > 0:
            raise ValueError(
                f"eps={eps}: expected a positive number (it guards the division by the standard deviation)"
            )
        if ddof not in (0, 1):
            raise ValueError(f"ddof={ddof}: expected 0 (population) or 1 (sample)")
        self.std, self.clip, self.eps, self.ddof = std, clip, eps, ddof

    @property
    def needs_iteration(self) -> bool:
        """Whether no advantage is known, not even up to a common factor, before the iteration's last reward."""
        return self.std == "global" and self.clip is not None

    @property
    def deferred(self) -> bool:
        """Whether groups close with centred rewards and one division by (std + eps) follows at the end."""
        return self.std == "global" and self.clip is None

    def is_affine(self, generations: int) -> bool:
        """Whether ``A`` is certain to be affine in the reward for groups of ``generations``: no clip, or one that
        cannot fire. With the group's std, ``|A| <= sqrt(M - 1)`` (population) or ``(M - 1) / sqrt(M)`` (sample)."""
        if self.clip is None:
            return True
        if self.std != "group":
            return False
        bound = (generations - 1) ** 0.5 if self.ddof == 0 else (generations - 1) / generations**0.5
        return bound <= self.clip

    def __call__(self, rewards: Tensor, prompt: Tensor, generation: Tensor) -> Advantages:
        """``rewards [n]`` (NaN = dropped sample) and their ids ``[n]``, ``[n]`` -> advantages. Groups must be whole.

        With ``std="global"`` the rewards given are the iteration's, unless :attr:`deferred`: then the values are
        centred rewards, to be multiplied by :meth:`final_scale` once the iteration's rewards are complete.
        """
        rewards = rewards.double()
        common = 1.0 if self.deferred else self._scale(rewards)
        table = rewards.new_full((int(prompt.max()) + 1, int(generation.max()) + 1), torch.nan)
        groups = {}
        for position in prompt.unique().tolist():
            rows = prompt == position
            values, groups[position] = self._group(rewards[rows], common)
            table[position, generation[rows]] = values
        return Advantages(table=table, groups=groups)

    def _group(self, rewards: Tensor, common: float) -> tuple[Tensor, Affine]:
        valid = rewards.isfinite()
        values, used = torch.zeros_like(rewards), rewards[valid]
        if len(used) == 0 or used.max() == used.min():
            return values, Affine(mean=used[0].item() if len(used) else 0.0, scale=0.0)
        form = Affine(mean=used.mean().item(), scale=self._scale(used) if self.std == "group" else common)
        values[valid] = (used - form.mean) * form.scale
        return values if self.clip is None else values.clamp(-self.clip, self.clip), form

    def final_scale(self, rewards: Tensor) -> float:
        """What the iteration's accumulated policy gradient is still to be multiplied by: 1 unless :attr:`deferred`.
        ``rewards [n]``: all of the iteration's, NaN = dropped."""
        return self._scale(rewards.double()) if self.deferred else 1.0

    def _scale(self, rewards: Tensor) -> float:
        if self.std == "none":
            return 1.0
        rewards = rewards[rewards.isfinite()]
        std = rewards.std(correction=self.ddof).item() if len(rewards) > self.ddof else 0.0
        if std == math.inf:
            raise ValueError(
                f"rewards up to {rewards.abs().max():.3g} have no finite standard deviation: scale them down"
            )
        return 1.0 / (std + self.eps)

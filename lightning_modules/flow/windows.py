r"""Which of the ``T`` denoising steps are trained, and which are sampled stochastically.

A window gives every row a set ``S`` of trained steps, drawn BEFORE the rollout, so that only those steps need a
log-probability and a graph. ``|S|`` is the same for every row. Steps outside ``S`` are ODE steps unless ``stochastic``
says otherwise (mixed ODE-SDE sampling: MixGRPO, arXiv 2507.21802). Timestep fraction: LeanGRPO, arXiv 2609.03528.

Steps count from 0 (most noise) to ``T - 1`` (which ends at ``sigma = 0``). The last step is left out by default; a
window may name it only for a transition that adds noise there.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_modules.flow.noise import keyed_generator
from lightning_modules.types import Rows

Stochastic = Literal["trained", "all_but_last", "all"]
DrawPer = Literal["iteration", "prompt", "sample"]


class Window(ABC):
    """A rule that says which steps of which row are trained.

    Args:
        stochastic: which steps the SDE samples: only the ``trained`` ones, ``all_but_last``, or ``all``. Trained steps
            always are.
    """

    def __init__(self, *, stochastic: Stochastic = "trained") -> None:
        self._stochastic = _one_of("stochastic", stochastic, get_args(Stochastic))

    @abstractmethod
    def candidates(self, num_steps: int) -> Tensor:
        """Bool ``[T]``: the steps that can ever be trained.

        Raises:
            ValueError: the window does not fit a grid of ``num_steps`` steps.
        """

    @abstractmethod
    def size(self, num_steps: int) -> int:
        """``|S|``, the number of trained steps of every row; at least 1. Raises as :meth:`candidates`."""

    @abstractmethod
    def trained(self, num_steps: int, *, seed: int, iteration: int, rows: Rows) -> Tensor:
        """Bool ``[N, T]``: the steps of each row that are trained in this iteration."""

    def stochastic(self, trained: Tensor) -> Tensor:
        """Bool ``[N, T]``: the steps of each row that are sampled by the SDE, given the trained ones."""
        if self._stochastic == "trained":
            return trained.clone()
        everywhere = torch.ones_like(trained)
        if self._stochastic == "all_but_last":
            everywhere[:, -1] = trained[:, -1]
        return everywhere


class DrawnWindow(Window):
    """A window drawn at random.

    Args:
        draw_per: one draw for the whole ``iteration``, one per ``prompt`` (its group is then compared under the same
            exploration: Flash-GRPO's iso-temporal grouping, arXiv 2605.15980), or one per ``sample``.
    """

    def __init__(self, *, draw_per: DrawPer = "iteration", stochastic: Stochastic = "trained") -> None:
        super().__init__(stochastic=stochastic)
        self.draw_per = _one_of("draw_per", draw_per, get_args(DrawPer))

    @abstractmethod
    def draw(self, num_steps: int, generator: torch.Generator) -> Tensor:
        """One set of trained steps, bool ``[T]``."""

    def trained(self, num_steps: int, *, seed: int, iteration: int, rows: Rows) -> Tensor:
        key_length = {"iteration": 0, "prompt": 1, "sample": 2}[self.draw_per]
        ids = zip(rows.prompt.tolist(), rows.generation.tolist(), strict=True)
        keys = [row[:key_length] for row in ids]
        drawn = {key: self.draw(num_steps, keyed_generator("window", seed, iteration, *key)) for key in set(keys)}
        return torch.stack([drawn[key] for key in keys]) if keys else torch.zeros(0, num_steps, dtype=torch.bool)


class AllButLast(Window):
    """Every step but the last, in every row."""

    def __init__(self, *, stochastic: Stochastic = "trained") -> None:
        super().__init__(stochastic=stochastic)

    def candidates(self, num_steps: int) -> Tensor:
        return _span(0, self.size(num_steps), num_steps)

    def size(self, num_steps: int) -> int:
        if num_steps < 2:
            raise ValueError(
                f"num_steps = {num_steps}: leaving out the last step leaves nothing to train; take at least 2"
            )
        return num_steps - 1

    def trained(self, num_steps: int, *, seed: int, iteration: int, rows: Rows) -> Tensor:
        return _same_for_all(self.candidates(num_steps), rows)


class Fraction(DrawnWindow):
    """``int(f (T - 1))`` of the ``T - 1`` trainable steps (all but the last), at random, without replacement.

    Args:
        fraction: ``f``, in (0, 1].
    """

    def __init__(self, fraction: float, *, draw_per: DrawPer = "iteration", stochastic: Stochastic = "trained") -> None:
        super().__init__(draw_per=draw_per, stochastic=stochastic)
        if not 0 < fraction <= 1:
            raise ValueError(f"fraction = {fraction}: must lie in (0, 1]")
        self.fraction = fraction

    def candidates(self, num_steps: int) -> Tensor:
        self.size(num_steps)
        return _span(0, num_steps - 1, num_steps)

    def size(self, num_steps: int) -> int:
        size = math.floor(self.fraction * (num_steps - 1) + 1e-9)  # 0.58 * 50 is 28.999999999999996 in floats, 29 here
        if size < 1:
            raise ValueError(
                f"fraction = {self.fraction} of {num_steps - 1} trainable steps is none: raise the fraction"
            )
        return size

    def draw(self, num_steps: int, generator: torch.Generator) -> Tensor:
        chosen = torch.randperm(num_steps - 1, generator=generator)[: self.size(num_steps)]
        mask = torch.zeros(num_steps, dtype=torch.bool)
        mask[chosen] = True
        return mask


class FixedWindow(Window):
    """The ``size`` steps from ``start`` on, always."""

    def __init__(self, start: int, size: int, *, stochastic: Stochastic = "trained") -> None:
        super().__init__(stochastic=stochastic)
        self._range = _Range(size, start, start + size)

    def candidates(self, num_steps: int) -> Tensor:
        low, high = self._range.bounds(num_steps)
        return _span(low, high - low, num_steps)

    def size(self, num_steps: int) -> int:
        return self._range.fitting_size(num_steps)

    def trained(self, num_steps: int, *, seed: int, iteration: int, rows: Rows) -> Tensor:
        return _same_for_all(self.candidates(num_steps), rows)


class RandomWindow(DrawnWindow):
    """``size`` consecutive steps at a random place inside ``[low, high)``; ``high`` defaults to ``T - 1``.

    Flash-GRPO is ``RandomWindow(1, high=10, draw_per="prompt")`` on 20 steps.
    """

    def __init__(
        self,
        size: int,
        low: int = 0,
        high: int | None = None,
        *,
        draw_per: DrawPer = "iteration",
        stochastic: Stochastic = "trained",
    ) -> None:
        super().__init__(draw_per=draw_per, stochastic=stochastic)
        self._range = _Range(size, low, high)

    def candidates(self, num_steps: int) -> Tensor:
        low, high = self._range.bounds(num_steps)
        return _span(low, high - low, num_steps)

    def size(self, num_steps: int) -> int:
        return self._range.fitting_size(num_steps)

    def draw(self, num_steps: int, generator: torch.Generator) -> Tensor:
        low, high = self._range.bounds(num_steps)
        size = self._range.size
        start = int(torch.randint(low, high - size + 1, (), generator=generator))
        return _span(start, size, num_steps)


class SlidingWindow(Window):
    """MixGRPO's progressive window (arXiv 2507.21802): ``size`` consecutive steps that move towards the clean end.

    The window starts at ``low``, moves by ``stride`` every ``every`` iterations, and starts again at ``low`` after its
    last full position inside ``[low, high)``; ``high`` defaults to ``T - 1``. It is never empty nor cut short.
    """

    def __init__(
        self,
        size: int,
        stride: int = 1,
        every: int = 25,
        low: int = 0,
        high: int | None = None,
        *,
        stochastic: Stochastic = "trained",
    ) -> None:
        super().__init__(stochastic=stochastic)
        self._range = _Range(size, low, high)
        self.stride = _at_least_one("stride", stride)
        self.every = _at_least_one("every", every)

    def candidates(self, num_steps: int) -> Tensor:
        spans = [_span(start, self._range.size, num_steps) for start in self._starts(num_steps)]
        return torch.stack(spans).any(0)

    def size(self, num_steps: int) -> int:
        return self._range.fitting_size(num_steps)

    def trained(self, num_steps: int, *, seed: int, iteration: int, rows: Rows) -> Tensor:
        starts = self._starts(num_steps)
        start = starts[iteration // self.every % len(starts)]
        return _same_for_all(_span(start, self._range.size, num_steps), rows)

    def _starts(self, num_steps: int) -> range:
        low, high = self._range.bounds(num_steps)
        return range(low, high - self._range.size + 1, self.stride)


class _Range:
    """``size`` steps inside ``[low, high)``, where ``high = None`` stands for ``T - 1``."""

    def __init__(self, size: int, low: int, high: int | None) -> None:
        self.size = _at_least_one("size", size)
        if low < 0:
            raise ValueError(f"a window from step {low}: steps count from 0")
        if high is not None and high - low < size:
            raise ValueError(f"a window of size {size} does not fit into steps [{low}, {high})")
        self._low, self._high = low, high

    def bounds(self, num_steps: int) -> tuple[int, int]:
        """``(low, high)`` on a grid of ``num_steps`` steps, checked."""
        high = num_steps - 1 if self._high is None else self._high
        if high > num_steps or high - self._low < self.size:
            raise ValueError(
                f"a window of size {self.size} in steps [{self._low}, {high}) does not fit a grid of {num_steps} "
                "steps: make it smaller or take more steps"
            )
        return self._low, high

    def fitting_size(self, num_steps: int) -> int:
        self.bounds(num_steps)
        return self.size


def _span(start: int, size: int, num_steps: int) -> Tensor:
    steps = torch.arange(num_steps)
    return (steps >= start) & (steps < start + size)


def _same_for_all(mask: Tensor, rows: Rows) -> Tensor:
    return mask.repeat(len(rows), 1)


def _at_least_one(name: str, value: int) -> int:
    if value < 1:
        raise ValueError(f"{name} = {value}: must be at least 1")
    return value


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        raise ValueError(f"{name} = {value!r}: choose one of {', '.join(choices)}")
    return value

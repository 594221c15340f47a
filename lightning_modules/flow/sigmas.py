r"""The noise grid of the reverse process, built from explicit formulas.

Notation: ``T`` steps need ``T + 1`` noise levels ``1 >= sigma_0 > sigma_1 > ... > sigma_T = 0``, where
``x_sigma = (1 - sigma) x_0 + sigma eps`` (1 = pure noise, 0 = clean). A shift ``k > 0`` moves the levels towards noise:

    shift(s) = k s / (1 + (k - 1) s)        shift(0) = 0, shift(1) = 1, strictly increasing.

Source: Esser et al. 2024 (Stable Diffusion 3, arXiv 2403.03206), resolution-dependent shifting. FLUX writes
``k = exp(mu)``.

Which grid a released model is sampled on, as diffusers 0.42 sets it:

    SD3, SD3.5    EulerSigmas(3)              FLUX.1-dev         DynamicShiftSigmas()
    Wan, 480p     UniPCSigmas(3)              Wan, 720p          UniPCSigmas(5)
    Wan under the flow-match Euler scheduler: EulerSigmas with the same shifts; DanceGRPO, all families: LinearSigmas(3)

Policies are conditioned on ``1000 sigma`` as it is, never on a truncated timestep.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

TRAINING_LEVELS = 1000
"""Noise levels of the schedulers that the models were released with."""


class Sigmas(ABC):
    """How the noise levels are chosen: called with a number of steps, gives the grid."""

    def __call__(self, num_steps: int, num_tokens: int | None = None) -> Tensor:
        """The grid for ``num_steps >= 1`` steps: ``[T + 1]`` float64 on the CPU, strictly decreasing to 0.

        ``num_tokens`` is the number of image tokens that the model sees; only resolution-dependent grids need it.

        Raises:
            ValueError: the number of steps or tokens does not fit, or the grid is not a valid one.
        """
        if num_steps < 1:
            raise ValueError(f"num_steps = {num_steps}: at least one denoising step is needed")
        sigmas = self.grid(num_steps, num_tokens)
        check_sigmas(sigmas)
        return sigmas

    @abstractmethod
    def grid(self, num_steps: int, num_tokens: int | None) -> Tensor:
        """The levels, ``[T + 1]`` float64 on the CPU; ``__call__`` validates them."""


class LinearSigmas(Sigmas):
    """``shift(linspace(1, 0, T + 1))`` with a constant shift (1 = evenly spaced). DanceGRPO's grid, with shift 3."""

    def __init__(self, shift: float = 1.0) -> None:
        self.shift = _checked_shift(shift)

    def grid(self, num_steps: int, num_tokens: int | None) -> Tensor:
        return _shifted_linear(num_steps, self.shift)


class DynamicShiftSigmas(Sigmas):
    """FLUX's grid: the shift ``k = exp(mu)`` grows with the resolution.

    ``mu`` is linear in the number of image tokens and passes through ``(base_tokens, base_shift)`` and
    ``(max_tokens, max_shift)``; beyond these it is extrapolated. Source: FLUX.1 (Black Forest Labs), as in diffusers'
    FLUX pipeline.
    """

    def __init__(
        self, base_shift: float = 0.5, max_shift: float = 1.15, base_tokens: int = 256, max_tokens: int = 4096
    ) -> None:
        if not 0 < base_tokens < max_tokens:
            raise ValueError(
                f"base_tokens = {base_tokens}, max_tokens = {max_tokens}: need 0 < base_tokens < max_tokens"
            )
        self.base_shift, self.max_shift = base_shift, max_shift
        self.base_tokens, self.max_tokens = base_tokens, max_tokens

    def grid(self, num_steps: int, num_tokens: int | None) -> Tensor:
        if num_tokens is None or num_tokens < 1:
            raise ValueError(f"num_tokens = {num_tokens}: a dynamic shift needs the number of image tokens")
        return _shifted_linear(num_steps, math.exp(self.mu(num_tokens)))

    def mu(self, num_tokens: int) -> float:
        """Logarithm of the shift at ``num_tokens`` image tokens."""
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        return self.base_shift + slope * (num_tokens - self.base_tokens)


class EulerSigmas(Sigmas):
    """SD3's grid, that of diffusers' flow-match Euler scheduler without dynamic shift.

    The scheduler shifts its table of 1,000 training levels, whose smallest becomes ``shift(1 / 1000)``, spaces T levels
    evenly from 1 to that one and shifts them AGAIN:

        sigma_i = shift(1 - i / (T - 1) (1 - shift(1 / 1000))),  i = 0 .. T - 1;    sigma_T = 0.

    So the last step is tiny (from 0.009 at shift 3, whatever T), unlike in :class:`LinearSigmas`.
    """

    def __init__(self, shift: float = 3.0) -> None:
        self.shift = _checked_shift(shift)

    def grid(self, num_steps: int, num_tokens: int | None) -> Tensor:
        smallest = float(_shifted(_spaced(1 / TRAINING_LEVELS, 0.0, 1), self.shift))
        return _shifted_to_zero(_spaced(1.0, smallest, num_steps), self.shift)


class UniPCSigmas(Sigmas):
    """Wan's grid, that of diffusers' UniPC scheduler with flow sigmas (``flow_shift``: 3 up to 480p, 5 at 720p).

        sigma_i = shift(start - i / T (start - end)),  i = 0 .. T - 1;    sigma_T = 0.

    The defaults are those of diffusers 0.42, except that its first level is 1 - 1e-6, a guard of the solver's logarithm
    that Euler-Maruyama steps do not need. Earlier versions, and Wan's own code, have ``start = 0.999, end = 0``:
    FlowGRPO's Wan recipe is on that grid. Below 1, the first step of ``FlowSDE`` is far too noisy: use ``WanSDE``.
    """

    def __init__(self, shift: float = 3.0, start: float = 1.0, end: float = 1 / TRAINING_LEVELS) -> None:
        if not 0 <= end < start <= 1:
            raise ValueError(f"start = {start}, end = {end}: need 0 <= end < start <= 1")
        self.shift, self.start, self.end = _checked_shift(shift), start, end

    def grid(self, num_steps: int, num_tokens: int | None) -> Tensor:
        return _shifted_to_zero(_spaced(self.start, self.end, num_steps + 1)[:-1], self.shift)


class ExplicitSigmas(Sigmas):
    """The levels written out, ``sigma_0`` to ``sigma_T = 0``; the number of steps must be ``len(values) - 1``."""

    def __init__(self, values: list[float]) -> None:
        self.values = torch.tensor(values, dtype=torch.float64)
        check_sigmas(self.values)

    def grid(self, num_steps: int, num_tokens: int | None) -> Tensor:
        if num_steps != len(self.values) - 1:
            raise ValueError(
                f"num_steps = {num_steps} but the explicit grid has {len(self.values)} levels, i.e. "
                f"{len(self.values) - 1} steps: change one of them"
            )
        return self.values.clone()


def check_sigmas(sigmas: Tensor) -> None:
    """Raise ``ValueError`` unless ``sigmas`` (``[T + 1]``) falls strictly from at most 1 to exactly 0."""
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise ValueError(f"sigmas of shape {tuple(sigmas.shape)}: need one dimension with at least two levels")
    if not bool(torch.isfinite(sigmas).all()):
        raise ValueError(f"sigmas = {sigmas.tolist()}: every level must be finite")
    if sigmas[0] > 1 or sigmas[-1] != 0:
        raise ValueError(
            f"sigmas run from {float(sigmas[0])} to {float(sigmas[-1])}: the first must be at most 1 (pure noise) and "
            "the last exactly 0 (clean)"
        )
    rises = (sigmas[1:] >= sigmas[:-1]).nonzero().flatten().tolist()
    if rises:
        raise ValueError(f"sigmas = {sigmas.tolist()}: not strictly decreasing after position {rises[0]}")


def _shifted_linear(num_steps: int, shift: float) -> Tensor:
    return _shifted(_spaced(1.0, 0.0, num_steps + 1), shift)


def _shifted_to_zero(levels: Tensor, shift: float) -> Tensor:
    """The shifted levels, followed by 0."""
    return torch.cat([_shifted(levels, shift), levels.new_zeros(1)])


def _spaced(first: float, last: float, count: int) -> Tensor:
    return torch.linspace(first, last, count, dtype=torch.float64)


def _shifted(s: Tensor, shift: float) -> Tensor:
    return shift * s / (shift * s + (1 - s))  # this form keeps shift(1) = 1 exactly, in floating point too


def _checked_shift(shift: float) -> float:
    if not (math.isfinite(shift) and shift > 0):
        raise ValueError(f"shift = {shift}: must be positive and finite (1 leaves the grid evenly spaced)")
    return shift

r"""The noise grid of the reverse process, built from explicit formulas.

Notation: ``T`` steps need ``T + 1`` noise levels ``1 >= sigma_0 > sigma_1 > ... > sigma_T = 0``, where
``x_sigma = (1 - sigma) x_0 + sigma eps`` (1 = pure noise, 0 = clean). A shift ``k > 0`` moves the levels towards noise:

    shift(s) = k s / (1 + (k - 1) s)        shift(0) = 0, shift(1) = 1, strictly increasing.

Source: Esser et al. 2024 (Stable Diffusion 3, arXiv 2403.03206), resolution-dependent shifting. FLUX writes
``k = exp(mu)``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor


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
    """``shift(linspace(1, 0, T + 1))`` with a constant shift (1 = evenly spaced; SD3 and Wan use 3 or more)."""

    def __init__(self, shift: float = 1.0) -> None:
        if not (math.isfinite(shift) and shift > 0):
            raise ValueError(f"shift = {shift}: must be positive and finite (1 leaves the grid evenly spaced)")
        self.shift = shift

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
    s = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    return shift * s / (shift * s + (1 - s))  # this form keeps shift(1) = 1 exactly, in floating point too

r"""One step of the reverse process, ``p(x' | x)``: a Gaussian whose mean is affine in the latents and the velocity.

Notation: ``x`` latents at noise level ``sigma``, ``x'`` at the next level ``sigma'``, ``dt = sigma' - sigma < 0``,
``v = eps - x_0`` the policy's velocity, ``D`` the number of elements of one latent, ``xi ~ N(0, 1)``. Every step is

    x' = a x + b v + std xi

so a transition is a table ``(a, b, std)`` over the grid. Most are Euler-Maruyama steps of one family (Flow-GRPO,
arXiv 2505.05470), whose members share their marginals and differ only in the diffusion ``s(sigma)``:

    dx = [v + s^2 / (2 sigma) (x + (1 - sigma) v)] dsigma + s dw,        score(x) = -(x + (1 - sigma) v) / sigma
    a = 1 + s^2 dt / (2 sigma),    b = dt (1 + s^2 (1 - sigma) / (2 sigma)),    std = s sqrt(-dt).

Log-probabilities and divergences are MEANS over the D elements (the field's convention since DDPO), hence independent
of resolution. They are computed in float32, or float64 if an input is float64, outside autocast.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.flow.sigmas import check_sigmas


@dataclass(frozen=True, kw_only=True)
class Coefficients:
    """The table of ``x' = a x + b v + std xi``, one entry per step."""

    latents: Tensor
    """[T] float64, ``a``."""
    velocity: Tensor
    """[T] float64, ``b``; negative, since the noise level falls."""
    std: Tensor
    """[T] float64, standard deviation of the whole step (``sqrt(-dt)`` included); 0 where the step is deterministic."""


class Transition(ABC):
    """A family of Gaussian steps along a grid of noise levels."""

    @abstractmethod
    def coefficients(self, sigmas: Tensor) -> Coefficients:
        """The step table on the grid ``sigmas`` (``[T + 1]``, see :mod:`lightning_modules.flow.sigmas`)."""

    def moments(self, latents: Tensor, velocity: Tensor, sigmas: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Mean ``[N, *latent]`` and standard deviation (0-dim, on the CPU so that nothing waits for it) of ``x'``.

        ``latents`` and ``velocity`` are ``[N, *latent]``, ``sigmas`` the whole grid ``[T + 1]``, ``step`` in 0..T-1.
        Both results are at least float32 and of the same dtype. Differentiable in latents and velocity.

        Raises:
            ValueError: the step lies outside the grid, or the grid is invalid.
        """
        table = self.coefficients(sigmas)
        if not 0 <= step < len(table.std):
            raise ValueError(f"step = {step}: this grid has steps 0 to {len(table.std) - 1}")
        with _no_autocast(latents):
            latents, velocity = _at_least_float32(latents, velocity)
            mean = float(table.latents[step]) * latents + float(table.velocity[step]) * velocity
        return mean, table.std[step].to(mean.dtype)

    def log_prob(self, next_latents: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """``log N(x'; mean, std^2)`` with its constants, mean over the latent's elements: ``[N]``.

        ``x'`` (``[N, *latent]``) is data: it is detached here, so the only gradient is that of the score function.

        Raises:
            ValueError: ``std`` is 0; a deterministic step has no density.
        """
        _require_noise(std, "log-probability")
        square = _mean_square(next_latents.detach(), mean)
        return -square / (2 * std**2) - torch.log(std) - 0.5 * math.log(2 * math.pi)

    def kl(self, mean: Tensor, reference_mean: Tensor, std: Tensor) -> Tensor:
        """``KL(N(mean, std^2) || N(reference_mean, std^2))``, mean over the latent's elements: ``[N]``.

        Raises:
            ValueError: ``std`` is 0; two different points have no finite divergence.
        """
        _require_noise(std, "KL divergence")
        return _mean_square(mean, reference_mean) / (2 * std**2)

    def sensitivity(self, sigmas: Tensor) -> Tensor:
        """How strongly a step's log-prob pulls at the velocity: ``lambda [T]`` float64, infinite where ``std = 0``.

        With ``x' = mean + std xi``, ``D dlog p / dv = (b / std) xi``; ``lambda = |b| / std``, for the SDE family

            lambda = sqrt(-dt) / s + s sqrt(-dt) (1 - sigma) / (2 sigma).

        Source: Flash-GRPO (arXiv 2605.15980), temporal gradient rectification, which weights a step by ``1 / lambda``.
        """
        table = self.coefficients(sigmas)
        return table.velocity.abs() / table.std


class ScoreSDE(Transition):
    """Euler-Maruyama on the family of the module docstring; a member names its diffusion ``s``."""

    @abstractmethod
    def diffusion(self, sigmas: Tensor) -> Tensor:
        """``s`` at the start of each step, ``[T]``, from the grid ``[T + 1]`` in float64."""

    def coefficients(self, sigmas: Tensor) -> Coefficients:
        grid = _grid(sigmas)
        sigma, dt = grid[:-1], grid.diff()
        diffusion = self.diffusion(grid)
        half_rate = diffusion**2 / (2 * sigma)
        latents = 1 + half_rate * dt
        if bool((latents < -1).any()):
            step = int(latents.argmin())
            raise ValueError(
                f"{type(self).__name__}: step {step} (sigma {float(sigma[step]):.6g}) multiplies the latents by "
                f"{float(latents[step]):.3g}; lower the noise, take more steps, or start the grid at exactly 1"
            )
        return Coefficients(
            latents=latents, velocity=dt * (1 + half_rate * (1 - sigma)), std=diffusion * torch.sqrt(-dt)
        )


class FlowSDE(ScoreSDE):
    """``s = noise_level sqrt(sigma / (1 - sigma))`` (Flow-GRPO, arXiv 2505.05470).

    At ``sigma = 1`` the next level takes sigma's place in the denominator only, as in the authors' implementation; the
    score term of that step's velocity, ``(1 - sigma)``, stays 0.

    ``s^2`` is not integrable at ``sigma = 1``, so the first step makes an error that does not shrink with the grid; the
    later steps forget it like ``T^(-noise_level^2)``, and everything else falls as ``1 / T`` (derived and tested on
    Gaussian data; below 1 % in the variance at 1,000 steps).
    """

    def __init__(self, noise_level: float = 0.7) -> None:
        self.noise_level = _positive("noise_level", noise_level)

    def diffusion(self, sigmas: Tensor) -> Tensor:
        sigma = sigmas[:-1]
        safe = torch.where(sigma == 1, sigmas[1], sigma)
        return self.noise_level * torch.sqrt(sigma / (1 - safe))


class DanceSDE(ScoreSDE):
    """``s = eta``, the same at every noise level (DanceGRPO, arXiv 2505.07818)."""

    def __init__(self, eta: float = 0.3) -> None:
        self.eta = _positive("eta", eta)

    def diffusion(self, sigmas: Tensor) -> Tensor:
        return torch.full_like(sigmas[:-1], self.eta)


class WanSDE(ScoreSDE):
    """``s = s_min + (s_max - s_min) sigma``, ``s_max = sigma_1``, ``s_min = sigma_T = 0`` (Flow-GRPO for Wan)."""

    def diffusion(self, sigmas: Tensor) -> Tensor:
        largest, smallest = sigmas[1], sigmas[-1]
        return smallest + (largest - smallest) * sigmas[:-1]


class ODE(ScoreSDE):
    """``s = 0``: the deterministic Euler step ``x' = x + v dt``. It has no log-probability."""

    def diffusion(self, sigmas: Tensor) -> Tensor:
        return torch.zeros_like(sigmas[:-1])


class CPS(Transition):
    r"""Coefficients-preserving sampling (Flow-CPS, arXiv 2509.05952): signal and noise levels add up at every step.

    With ``x_0 = x - sigma v``, ``eps = x + (1 - sigma) v`` and ``alpha = noise_level pi / 2``,

        x' = (1 - sigma') x_0 + sigma' cos(alpha) eps + sigma' sin(alpha) xi.

    The last step (``sigma' = 0``) is deterministic.

    It does NOT converge to the data's marginals as the grid is refined. The predicted ``x_0`` and ``eps`` are
    conditional means: they lack the posterior's spread, and since ``std`` does not shrink with ``dt`` the deficit of
    each step stays finite. On Gaussian data of variance ``S^2`` the limit is ``S^2 cos^2(alpha / 2)`` (65 % at noise
    level 0.8; derived here and tested). The latents look cleaner than an SDE's, which is its purpose.

    Args:
        noise_level: in (0, 1]; the share of fresh noise in a step's noise is ``sin(noise_level pi / 2)``.
        density: ``flow_cps`` is the authors' ``log p := -mean (x' - mean)^2``, no likelihood: relative to the Gaussian
            it weights a step's gradient by ``2 std^2``, so clip ranges of the two are not comparable. ``gaussian`` is
            the true log-density.
    """

    def __init__(self, noise_level: float = 0.8, density: Literal["flow_cps", "gaussian"] = "flow_cps") -> None:
        if not 0 < noise_level <= 1:
            raise ValueError(f"noise_level = {noise_level}: CPS needs 0 < noise_level <= 1 (a share of a quarter turn)")
        if density not in ("flow_cps", "gaussian"):
            raise ValueError(f"density = {density!r}: choose 'flow_cps' or 'gaussian'")
        self.noise_level = noise_level
        self.density = density

    def coefficients(self, sigmas: Tensor) -> Coefficients:
        grid = _grid(sigmas)
        sigma, following = grid[:-1], grid[1:]
        angle = self.noise_level * math.pi / 2
        kept = following * math.cos(angle)
        return Coefficients(
            latents=(1 - following) + kept,
            velocity=-sigma * (1 - following) + (1 - sigma) * kept,
            std=following * math.sin(angle),
        )

    def log_prob(self, next_latents: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """``[N]``, mean over the latent's elements, by the chosen ``density``; otherwise as in :class:`Transition`."""
        if self.density == "gaussian":
            return super().log_prob(next_latents, mean, std)
        _require_noise(std, "log-probability")
        return -_mean_square(next_latents.detach(), mean)

    def sensitivity(self, sigmas: Tensor) -> Tensor:
        """``[T]``: ``|b| / std`` for the Gaussian, ``2 |b| std`` for Flow-CPS's own; infinite where ``std = 0``."""
        gaussian = super().sensitivity(sigmas)
        if self.density == "gaussian":
            return gaussian
        std = self.coefficients(sigmas).std
        return torch.where(std > 0, gaussian * 2 * std**2, math.inf)


def _grid(sigmas: Tensor) -> Tensor:
    grid = sigmas.detach().to("cpu", torch.float64)
    check_sigmas(grid)
    return grid


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} = {value}: must be positive and finite (use the ODE for steps without noise)")
    return value


def _require_noise(std: Tensor, quantity: str) -> None:
    if not bool((std > 0).all()):
        raise ValueError(
            f"std = {std.tolist()}: a deterministic step has no {quantity}; leave it out of the trained window"
        )


def _no_autocast(tensor: Tensor) -> torch.autocast:
    return torch.autocast(tensor.device.type, enabled=False)


def _at_least_float32(*tensors: Tensor) -> list[Tensor]:
    dtype = reduce(torch.promote_types, (t.dtype for t in tensors), torch.float32)
    return [t.to(dtype) for t in tensors]


def _mean_square(a: Tensor, b: Tensor) -> Tensor:
    """Mean over the latent's elements of ``(a - b)^2``: ``[N, *latent]`` twice -> ``[N]``, at least float32."""
    with _no_autocast(b):
        a, b = _at_least_float32(a, b)
        return (a - b).square().flatten(1).mean(1)

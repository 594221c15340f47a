"""The one sampling loop. Randomness is an argument, and so is the gradient mode: a schedule decides what happens on
the steps it trains, everything else is sampled here without gradients.

    x_0 (noise) -> x_1 -> ... -> x_T (clean),   x_{t+1} = mean_t(x_t, v_t) + std_t z_t

Rows of one batch may differ in what a step is to them: trained (handed to ``on_trained``), stochastic, or an ODE
(Euler) step. Trained rows make a policy call of their own, so that a later recomputation can repeat the very call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.flow.transitions import ODE, Transition
from lightning_modules.types import Conditioning, Request

Velocity = Callable[[Tensor, Tensor, Conditioning], Tensor]
"""(latents ``[N, *latent]``, sigma ``[N]``, conditioning) -> velocity ``[N, *latent]``."""

OnTrained = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(step, row index ``[n]``, latents ``[n, *latent]``, noise ``[n, *latent]``) -> next latents, detached."""


@dataclass(frozen=True, kw_only=True)
class ReverseProcess:
    """A velocity field, a noise grid and the transition kernel between its levels."""

    velocity: Velocity
    transition: Transition
    sigmas: Tensor
    """[T + 1] float64."""

    @property
    def num_steps(self) -> int:
        return len(self.sigmas) - 1

    def velocity_at(
        self, step: int, latents: Tensor, conditioning: Conditioning, field: Velocity | None = None
    ) -> Tensor:
        """One call of the field (or of ``field`` in its place, the reference policy's, say) at level ``step``."""
        dtype = torch.promote_types(latents.dtype, torch.float32)
        sigma = self.sigmas[step].to(latents.device, dtype).expand(len(latents))
        return (field or self.velocity)(latents, sigma, conditioning)

    def moments(
        self, step: int, latents: Tensor, conditioning: Conditioning, field: Velocity | None = None
    ) -> tuple[Tensor, Tensor]:
        """Mean ``[n, *latent]`` and std of ``x_{step+1} | x_step``, by one policy call in the caller's gradient mode."""
        return self.transition.moments(latents, self.velocity_at(step, latents, conditioning, field), self.sigmas, step)


def draw(mean: Tensor, std: Tensor, noise: Tensor, dtype: torch.dtype) -> Tensor:
    """``mean + std z``, detached and rounded to the dtype latents are stored in BEFORE anything is scored, so that a
    recomputation sees the very same numbers."""
    return (mean.detach() + std * noise.to(mean)).to(dtype)


def denoise(process: ReverseProcess, request: Request, on_trained: OnTrained | None = None) -> Tensor:
    """Roll ``request`` out -> clean latents ``[N, *latent]``, detached, in the dtype of ``request.initial``.

    Errors: ``ValueError`` naming the step and rows as soon as a latent stops being finite.
    """
    latents = request.initial
    if not len(request) and not request.in_step:
        return latents
    everyone = torch.arange(len(latents))
    for step in range(process.num_steps):
        trained = request.trained[:, step]
        noise = request.noise(step) if request.stochastic[:, step].any() else torch.empty_like(latents)
        if on_trained is None or not request.trained_calls(step):
            latents = _free_step(process, request, step, everyone, latents, noise)
        elif not request.free_call(step):
            latents = on_trained(step, everyone, latents, noise)
        else:
            after = torch.empty_like(latents)
            for index, advance in ((trained.nonzero().flatten(), on_trained), ((~trained).nonzero().flatten(), None)):
                x, z = latents[index.to(latents.device)], noise[index.to(noise.device)]
                moved = advance(step, index, x, z) if advance else _free_step(process, request, step, index, x, z)
                after[index.to(after.device)] = moved
            latents = after
        _check_finite(latents, request, step)
    return latents


@torch.no_grad()
def _free_step(
    process: ReverseProcess, request: Request, step: int, index: Tensor, latents: Tensor, noise: Tensor
) -> Tensor:
    """An untrained step of the rows ``index``: one policy call, then SDE or Euler row by row."""
    velocity = process.velocity_at(step, latents, request.conditioning.rows(index))
    after = ODE().moments(latents, velocity, process.sigmas, step)[0].to(latents.dtype)
    stochastic = request.stochastic[index, step].to(latents.device)
    if stochastic.any():
        noisy = draw(*process.transition.moments(latents, velocity, process.sigmas, step), noise, latents.dtype)
        after = torch.where(stochastic.view(-1, *[1] * (latents.ndim - 1)), noisy, after)
    return after


def _check_finite(latents: Tensor, request: Request, step: int) -> None:
    finite = latents.flatten(1).isfinite().all(dim=1).cpu()
    if not finite.all():
        bad = (~finite).nonzero().flatten()
        ids = [(int(p), int(g)) for p, g in zip(request.rows.prompt[bad], request.rows.generation[bad], strict=True)]
        raise ValueError(
            f"latents are not finite after step {step} for (prompt, generation) {ids[:4]}: the policy diverged or its "
            "precision overflows; lower the learning rate, use bf16 or fp32 instead of fp16, or resume from an earlier checkpoint"
        )

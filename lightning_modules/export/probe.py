"""A fixed question to a policy, to see whether two sets of weights answer alike."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_modules.policies.base import Policy

PROMPT = "a red circle"


class Probe:
    """A policy's velocity at one noise, sigma = 1/2 and one prompt, ``[1, *latent]`` fp32 on the CPU."""

    def __init__(self, policy: Policy) -> None:
        self.latents = torch.randn(1, *policy.latent_shape, generator=torch.Generator().manual_seed(0))
        self.conditioning = policy.encode([PROMPT])

    @torch.no_grad()
    def __call__(self, policy: Policy) -> Tensor:
        device = policy.device
        sigma = torch.full((1,), 0.5, device=device)
        return policy(self.latents.to(device), sigma, self.conditioning.to(device)).cpu()

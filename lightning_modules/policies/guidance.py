r"""Classifier-free guidance (Ho and Salimans 2022, arXiv 2207.12598) as a policy that wraps a policy:

    v = v(negative prompt) + w (v(prompt) - v(negative prompt))

with gradients through both terms. It is the same velocity in the rollout, in the update and in evaluation. ``w = 1`` is the
wrapped policy itself, which saves half of the work; guidance amplifies gradients, and no guidance is the steadier choice
for RL, which sharpens a policy much as guidance does (FlowGRPO, arXiv 2505.05470).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lightning_modules.policies.base import Policy, Reference
from lightning_modules.policies.reference import reference_of
from lightning_modules.types import Conditioning

_NEGATIVE = "negative_"


class ClassifierFreeGuidance(Policy):
    """A guided policy.

    Args:
        policy: what is guided, the only child.
        scale: w, finite and not negative; 1 = the prompt alone, 0 = the negative prompt alone.
        negative_prompt: of all samples.
        batched: both terms in one forward of twice the rows; ``False``: two forwards, with half the peak memory where no
            graph is kept.

    Errors: ``ValueError`` on an impossible scale and on a policy that is guided already.
    """

    def __init__(self, policy: Policy, scale: float, negative_prompt: str = "", batched: bool = True) -> None:
        super().__init__()
        _check_scale(scale)
        if isinstance(policy, ClassifierFreeGuidance):
            raise ValueError(f"the policy is guided already, with scale={policy.scale}: wrap the unguided one")
        self.policy, self.scale, self.negative_prompt, self.batched = policy, scale, negative_prompt, batched
        self._negative: Conditioning | None = None

    @property
    def latent_shape(self) -> tuple[int, ...]:
        return self.policy.latent_shape

    @property
    def num_tokens(self) -> int | None:
        return self.policy.num_tokens

    @torch.inference_mode(False)  # what is kept for training may first be encoded by a validation
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """The wrapped policy's conditioning, and under ``negative_<name>`` that of the negative prompt, encoded once."""
        positive = self.policy.encode(prompts)
        if self.scale == 1:
            return positive
        if self._negative is None:
            self._negative = self.policy.encode([self.negative_prompt])
        negative = {
            _NEGATIVE + name: row.expand(len(positive), *row.shape[1:])
            for name, row in self._negative.to(self.device).tensors.items()
        }
        return Conditioning(tensors=positive.tensors | negative)

    def forward(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        if self.scale == 1:
            return self.policy(latents, sigma, conditioning)
        negative, positive = _split(conditioning)
        if self.batched:
            both = Conditioning(tensors={k: torch.cat([negative.tensors[k], v]) for k, v in positive.tensors.items()})
            away, towards = self.policy(torch.cat([latents, latents]), torch.cat([sigma, sigma]), both).chunk(2)
        else:
            away, towards = self.policy(latents, sigma, negative), self.policy(latents, sigma, positive)
        return away + self.scale * (towards - away)

    def decode(self, latents: Tensor) -> Tensor:
        return self.policy.decode(latents)

    def identity(self) -> dict[str, Any]:
        return self.policy.identity()

    def drawing(self) -> dict[str, Any]:
        """The wrapped policy's, with w as ``guidance`` and, where w is not 1, the ``negative_prompt``; guidance that the
        wrapped policy has of its own becomes ``inner_guidance``."""
        inner = self.policy.drawing()
        own = {"guidance": self.scale} | ({} if self.scale == 1 else {"negative_prompt": self.negative_prompt})
        return inner | own | ({} if inner["guidance"] == 1 else {"inner_guidance": inner["guidance"]})

    @contextmanager
    def drawing_with(
        self, *, guidance: float | None = None, height: int | None = None, width: int | None = None
    ) -> Iterator[None]:
        """``guidance`` is w; the size is the wrapped policy's."""
        before = self.scale
        with self.policy.drawing_with(height=height, width=width):
            try:
                self.scale = before if guidance is None else _check_scale(guidance)
                yield
            finally:
                self.scale = before

    def reference(self) -> Reference:
        """The guided velocity of the wrapped policy as it is now."""
        return reference_of(self)


def _check_scale(scale: float) -> float:
    if not (math.isfinite(scale) and scale >= 0):
        raise ValueError(f"scale={scale}: give a finite number of at least 0; 1 is no guidance")
    return scale


def _split(conditioning: Conditioning) -> tuple[Conditioning, Conditioning]:
    """(negative, positive) halves."""
    negative = {k.removeprefix(_NEGATIVE): v for k, v in conditioning.tensors.items() if k.startswith(_NEGATIVE)}
    positive = {k: v for k, v in conditioning.tensors.items() if not k.startswith(_NEGATIVE)}
    return Conditioning(tensors=negative), Conditioning(tensors=positive)

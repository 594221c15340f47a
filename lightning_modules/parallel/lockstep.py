"""Keeping step: where the policy's weights are sharded, each forward and each backward is a collective, and a rank that
makes fewer of them than the others hangs them all. Every rank can compute everybody's share, so each makes as many
policy calls as the busiest one; a call without rows of its own runs the policy on a stand-in and keeps none of it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from lightning_modules.flow.denoise import Velocity
from lightning_modules.parallel.layout import Layout, Round
from lightning_modules.types import Conditioning, Peers, Rows


def peers(layout: Layout, part: Round, trained: Callable[[Rows], Tensor], in_step: bool) -> Peers:
    """What the ranks do in a round. ``trained``: rows ``[n]`` -> ``[n, T]`` bool, the steps they train."""
    shares = [layout.rows(part.start, part.stop, rank) for rank in range(layout.ranks)]
    masks = [trained(share) for share in shares]
    return Peers(
        rows=Rows(
            prompt=torch.cat([share.prompt for share in shares]),
            generation=torch.cat([share.generation for share in shares]),
        ),
        trained=torch.cat(masks),
        most_trained=tuple(torch.stack([mask.sum(0) for mask in masks]).amax(0).tolist()),
        any_free=tuple((~torch.cat(masks)).any(0).tolist()),
        in_step=in_step,
    )


class Lockstep:
    """A velocity field that can be called with no rows: it then evaluates a stand-in and returns none of its rows. The
    graph is kept, so that a backward visits the same layers, with gradients of exactly zero.

    Args:
        field: what is called.
    """

    def __init__(self, field: Velocity) -> None:
        self._field = field
        self._stand_in: tuple[Tensor, Conditioning] | None = None

    def stand_in(self, latents: Tensor, conditioning: Conditioning) -> None:
        """What is evaluated in place of no rows: ``latents [1, *latent]`` and one row of conditioning."""
        self._stand_in = latents, conditioning

    def __call__(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        if len(latents):
            return self._field(latents, sigma, conditioning)
        assert self._stand_in is not None, "called with no rows before there is a stand-in"
        latents, conditioning = self._stand_in
        return self._field(latents, torch.full((1,), 0.5).to(sigma), conditioning)[:0]

"""The anchor of the KL term for a policy with adapters: the same weights with the adapters off. No copy is held.

(For full fine-tuning the anchor is a frozen copy: ``policies.base.Reference``.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lightning_modules.policies.base import Policy, Reference
from lightning_modules.policies.fingerprint import frozen_fingerprint
from lightning_modules.policies.lora import adapter_layers, adapters_off, starts_from_base
from lightning_modules.types import Conditioning


def reference_of(policy: Policy) -> Reference:
    """The policy as it is now, frozen, at the least cost: adapters off where it has some, else a copy."""
    return AdapterReference(policy) if adapter_layers(policy) else Reference(policy)


class AdapterReference(Reference):
    """A policy's velocity field with its adapters off during each call, and everything as before afterwards.

    Errors: ``ValueError`` unless the adapters are there and add exactly zero now: the anchor would not be the policy
    that training starts from.
    """

    def __init__(self, policy: Policy) -> None:
        with adapters_off(policy):
            pass
        if not starts_from_base(policy):
            raise ValueError(
                "the adapters are not zero at the start, so switching them off is not the policy that training starts "
                "from: fuse them into the base model first, or set beta: 0"
            )
        self._policy = policy
        self._fingerprint = frozen_fingerprint(policy)

    @torch.no_grad()
    def __call__(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        with adapters_off(self._policy):
            return self._policy(latents, sigma, conditioning)

    def shard(self, shard: Callable[[nn.Module], None]) -> None:
        """Nothing to do: the weights are the policy's own."""

    def like(self, policy: Policy) -> AdapterReference:
        """Nothing to do: the weights are the policy's own."""
        return self

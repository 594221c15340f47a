"""The one door to a pretrained generator. Everything family-specific (casts, scaling, packing, the model's own
timestep convention, guidance) lives behind it.

Notation: ``x_sigma = (1 - sigma) x_0 + sigma eps``, ``sigma = 1`` pure noise, ``sigma = 0`` clean;
the velocity is ``v = eps - x_0``, hence ``x_0 = x_sigma - sigma v``.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lightning_modules.policies.fingerprint import fingerprint
from lightning_modules.types import Conditioning


class Policy(nn.Module, ABC):
    """A velocity field conditioned on text, with what is needed to feed it (``encode``) and to look at it (``decode``).

    Children of the module are what is trained and checkpointed, nothing else: frozen encoders and the VAE sit in a
    :class:`FrozenParts` holder, which is neither a child nor in a state dict.
    """

    @property
    @abstractmethod
    def latent_shape(self) -> tuple[int, ...]:
        """Shape of one latent, without the batch dimension: ``(C, H, W)`` or ``(C, F, H, W)``."""

    @property
    def num_tokens(self) -> int | None:
        """Image tokens the backbone sees per latent, for resolution-dependent noise grids; ``None`` if it has none."""
        return None

    @abstractmethod
    def encode(self, prompts: Sequence[str]) -> Conditioning:
        """``[N]`` prompts -> conditioning with N rows, detached, on the device of the trained parameters."""

    @abstractmethod
    def forward(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """``latents [N, *latent]``, ``sigma [N]`` in [0, 1], conditioning with N rows -> velocity ``[N, *latent]``.

        DDP, FSDP and compile act on this method alone, so samplers must call the module, never a part of it.
        """

    @abstractmethod
    def decode(self, latents: Tensor) -> Tensor:
        """Clean latents ``[N, *latent]`` -> images ``[N, 3, H, W]`` (video ``[N, 3, F, H, W]``), float32 in [0, 1]."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def identity(self) -> dict[str, Any]:
        """What draws, as plain values for result files: the class, and where its weights came from."""
        return {"class": f"{type(self).__module__}.{type(self).__qualname__}"}

    def drawing(self) -> dict[str, Any]:
        """What shapes an image beside prompt, noise and steps, as plain values: ``guidance`` (1 = the prompt alone),
        ``height`` and ``width`` (pixels; ``None`` where the policy does not say) and what a class adds."""
        return {"guidance": 1.0, "height": None, "width": None}

    @contextmanager
    def drawing_with(
        self, *, guidance: float | None = None, height: int | None = None, width: int | None = None
    ) -> Iterator[None]:
        """Inside, the policy draws with another guidance scale or at another size (pixels), ``None`` for no change;
        afterwards, also after an exception, as before. Errors: ``ValueError`` on what it cannot change."""
        before = self.drawing()
        wanted = {"guidance": guidance, "height": height, "width": width}
        changes = {name: value for name, value in wanted.items() if value is not None and value != before[name]}
        try:
            if changes:
                self._redraw(changes)
            yield
        finally:
            if changes:
                self._redraw({name: before[name] for name in changes}, restore=True)

    def _redraw(self, changes: Mapping[str, Any], restore: bool = False) -> None:
        """Take over changed values of :meth:`drawing`; ``restore``: those of before."""
        if restore:
            return
        name, value = next(iter(changes.items()))
        remedy = (
            "wrap it in ClassifierFreeGuidance with scale: 1 to draw with guidance in evaluation alone"
            if name == "guidance"
            else "leave it out"
        )
        raise ValueError(f"{name}={value}: {type(self).__name__} draws with {self.drawing()[name]} only; {remedy}")

    def reference(self) -> Reference:
        """The policy as it is now, frozen: the anchor of the KL term. A copy here; an adapter policy switches off its
        adapters instead."""
        return Reference(self)


class Reference:
    """A frozen copy of a policy's velocity field. Deliberately no ``nn.Module``: neither a child nor checkpointed."""

    def __init__(self, policy: Policy) -> None:
        self._policy = copy.deepcopy(policy).requires_grad_(False).eval()
        self._fingerprint = fingerprint(self._policy.state_dict())

    @torch.no_grad()
    def __call__(self, latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        return self._policy(latents, sigma, conditioning)

    def fingerprint(self) -> str:
        """Short name of the frozen weights, to recognise the same anchor after a resume."""
        return self._fingerprint

    def shard(self, shard: Callable[[nn.Module], None]) -> None:
        """Shard what the reference holds for itself, where the policy is sharded."""
        shard(self._policy)

    def like(self, policy: Policy) -> Reference:
        """Move to the device and cast to the dtype that the policy's tensors have by now (the trainer's precision)."""
        for mine, theirs in zip(_tensors(self._policy), _tensors(policy), strict=True):
            mine.data = mine.data.to(theirs.device, theirs.dtype)
        return self


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


class FrozenParts:
    """Plain holder of frozen modules (text encoder, VAE): moved explicitly, invisible to ``state_dict`` and DDP."""

    def __init__(self, **modules: nn.Module) -> None:
        for module in modules.values():
            module.requires_grad_(False).eval()
        self._modules_by_name = modules

    def __getattr__(self, name: str) -> nn.Module:
        try:
            return self.__dict__["_modules_by_name"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __deepcopy__(self, memo: dict) -> FrozenParts:
        """A copied policy shares its frozen parts: nothing trains them, and they may be larger than what is trained."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all their parameters and buffers."""
        return sum(t.nbytes for module in self._modules_by_name.values() for t in _tensors(module))

    def to(self, device: torch.device | str) -> FrozenParts:
        for module in self._modules_by_name.values():
            module.to(device)
        return self

"""A reward that owns frozen networks, read at first use and kept on the CPU until there is something to score.

Scores are a function of the images, prompts and weights alone: networks run in eval mode, outside the caller's autocast,
and reading them leaves the caller's random numbers, default dtype and default device as they are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from rewards.base import Reward
from rewards.files import checksum
from rewards.images import refuse_video

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class NetworkReward(Reward):
    """Base of the rewards with networks.

    Args:
        device: where scores are computed; ``None``: where the images are.
        dtype: of the weights; ``float32``, ``bfloat16`` or ``float16``.

    Errors: ``ValueError`` on an unknown dtype; from :meth:`load`, whatever is wrong with the weights; from scoring, on
    videos unless the class says that it takes them.
    """

    takes_video: ClassVar[bool] = False
    """Whether :meth:`measure` takes ``[N, 3, F, H, W]``."""

    def __init__(self, *, device: str | None = None, dtype: str = "float32") -> None:
        check_choice("dtype", dtype, DTYPES)
        self.device = None if device is None else torch.device(device)
        self.dtype = DTYPES[dtype]
        self.files: dict[str, Path] = {}
        """The weight files, by network; :meth:`build` fills them in."""
        self._networks: dict[str, nn.Module] | None = None

    @abstractmethod
    def build(self) -> dict[str, nn.Module]:
        """Read the networks, by name, in float32 on the CPU, and note their files in ``self.files``."""

    @abstractmethod
    def measure(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """:meth:`Reward.score` with images and networks on one device."""

    @property
    def networks(self) -> dict[str, nn.Module]:
        """By name, in ``self.dtype``; read if they have not been."""
        self.load()
        assert self._networks is not None
        return self._networks

    def load(self) -> None:
        if self._networks is None:
            with _plain_torch():
                networks = self.build()
            self._networks = {name: n.eval().requires_grad_(False).to(self.dtype) for name, n in networks.items()}

    def to(self, device: torch.device | str) -> None:
        """Move the networks, where they have been read."""
        for network in (self._networks or {}).values():
            network.to(device)

    def identity(self) -> dict[str, Any]:
        """``dtype`` and, under ``weights``, the SHA-256 of each network's file; reads the networks if need be."""
        self.load()
        weights = {name: checksum(file) for name, file in self.files.items()}
        return super().identity() | {"dtype": str(self.dtype).removeprefix("torch."), "weights": weights}

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        if not self.takes_video:
            refuse_video(images, self)
        self.load()
        device = self.device or images.device
        self.to(device)
        with torch.autocast(device.type, enabled=False):
            return self.measure(images.to(device), prompts, metadata)


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    """``ValueError`` unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r}: choose one of {', '.join(choices)}")


@contextmanager
def _plain_torch() -> Iterator[None]:
    """float32 on the CPU whatever the caller's defaults, and the caller's random numbers afterwards."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)

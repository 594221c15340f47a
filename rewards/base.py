"""What a reward is: finished images and their prompts in, one score per sample out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor


class Reward(ABC):
    """Frozen and without gradients. Deliberately no ``nn.Module``, so that it can never become a child of the
    LightningModule or part of its checkpoint; a reward that owns a network keeps it as a plain attribute."""

    reads: ClassVar[str] = "prompt"
    """What of a sample the score depends on, which decides how ``rewards.check`` probes it: ``prompt`` (image and prompt),
    ``image``, ``text`` (rendered words), ``objects`` (GenEval's metadata) or ``shapes`` (of the embedded world)."""

    def load(self) -> None:  # noqa: B027 (nothing to do is a fine default)
        """Read the weights, or reach the server, now: called before the first rollout, so that a missing file loses no
        work. Errors: ``ValueError`` naming what is missing and how to get it."""

    def to(self, device: torch.device | str) -> None:  # noqa: B027
        """Move what the reward owns; by default nothing. Called to make room while the policy is at work."""

    def identity(self) -> dict[str, Any]:
        """What produced the scores, as plain values for result files: the class, and of a network its version and the
        checksum of its weights."""
        return {"class": f"{type(self).__module__}.{type(self).__qualname__}"}

    @abstractmethod
    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """``images [N, 3, H, W]`` (or ``[N, 3, F, H, W]``) float in [0, 1] -> ``[N]`` scores, larger is better."""

    @torch.no_grad()
    def __call__(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """Check the input, score it, check the output's length. Errors: ``ValueError`` on a wrong range, dtype or
        length; whatever :meth:`score` raises passes through."""
        check_images(images)
        if not len(images) == len(prompts) == len(metadata):
            raise ValueError(
                f"{len(images)} images, {len(prompts)} prompts, {len(metadata)} metadata entries: give one of each per sample"
            )
        scores = torch.as_tensor(self.score(images, prompts, metadata), dtype=torch.float64, device="cpu")
        if scores.shape != (len(images),):
            raise ValueError(
                f"{type(self).__name__} returned scores of shape {tuple(scores.shape)} for {len(images)} images; return one "
                "score per image"
            )
        return scores


def check_images(images: Tensor) -> None:
    """``ValueError`` unless ``images`` is float ``[N, 3, H, W]`` or ``[N, 3, F, H, W]`` with finite values in [0, 1]."""
    if images.ndim not in (4, 5) or images.shape[1] != 3:
        raise ValueError(f"images of shape {tuple(images.shape)}: expected [N, 3, H, W] or [N, 3, F, H, W]")
    if not images.is_floating_point():
        raise ValueError(f"images of dtype {images.dtype}: expected float in [0, 1]; divide uint8 by 255")
    if images.numel():
        low, high = images.amin().item(), images.amax().item()
        if not (low >= 0.0 and high <= 1.0):  # also catches NaN
            raise ValueError(f"images span [{low:.4g}, {high:.4g}]: expected [0, 1] (decode before scoring)")

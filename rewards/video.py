"""Rewards of videos ``[N, 3, F, H, W]``: those that see motion, and image rewards applied to single frames.

* A reward that needs whole videos is a :class:`VideoReward`; it knows the frame rate that they are played at.
* Any image reward becomes a video reward inside :class:`FirstFrame`, :class:`MeanOverFrames` or :class:`EveryNthFrame`:
  with ``S`` the chosen frames, ``score = 1/|S| sum_{f in S} reward(frame f)``. Plain images pass through unchanged, so
  the wrapped reward serves image models as well.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rewards.base import Reward


class VideoReward(Reward):
    """A reward of whole videos.

    Args:
        fps: frames per second that the videos are played at.

    Errors: ``ValueError`` on a frame rate that is not positive; on scoring images.
    """

    def __init__(self, *, fps: float) -> None:
        if not (math.isfinite(fps) and fps > 0):
            raise ValueError(f"fps={fps}: give the videos' frames per second, a positive number")
        self.fps = fps

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "fps": self.fps}

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        if images.ndim != 5:
            raise ValueError(
                f"{type(self).__name__} scores videos [N, 3, F, H, W], not images of shape {tuple(images.shape)}: train a "
                "video model with it, or take an image reward"
            )
        return self.score_videos(images, prompts, metadata)

    @abstractmethod
    def score_videos(self, videos: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """``videos [N, 3, F, H, W]`` float in [0, 1], played at :attr:`fps` -> ``[N]`` scores, larger is better."""


class FrameReward(Reward):
    """An image reward on some frames of a video, averaged.

    Args:
        reward: scores the frames, as images.

    Errors: ``ValueError`` if ``reward`` scores videos itself.
    """

    def __init__(self, reward: Reward) -> None:
        if isinstance(reward, VideoReward):
            raise ValueError(
                f"{type(reward).__name__} scores whole videos: use it as it is, without {type(self).__name__}"
            )
        self.reward = reward

    @abstractmethod
    def frames(self, count: int) -> Sequence[int]:
        """Which of a video's ``count`` frames are scored, at least one, by index."""

    def load(self) -> None:
        self.reward.load()

    def to(self, device: torch.device | str) -> None:
        self.reward.to(device)

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "reward": self.reward.identity()}

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        if images.ndim == 4:
            return self.reward(images, prompts, metadata)
        frames = self.frames(images.shape[2])
        return mean_over_frames(lambda frame: self.reward(frame, prompts, metadata), images, frames)


class FirstFrame(FrameReward):
    """The score of a video's first frame."""

    def frames(self, count: int) -> Sequence[int]:
        return (0,)


class EveryNthFrame(FrameReward):
    """The mean over frames 0, n, 2n, ...

    Args:
        reward: scores the frames, as images.
        n: distance of two scored frames.
    """

    def __init__(self, reward: Reward, n: int) -> None:
        super().__init__(reward)
        if n < 1:
            raise ValueError(f"n={n}: give the distance of two scored frames, at least 1")
        self.n = n

    def identity(self) -> dict[str, Any]:
        return {**super().identity(), "n": self.n}

    def frames(self, count: int) -> Sequence[int]:
        return range(0, count, self.n)


class MeanOverFrames(EveryNthFrame):
    """The mean over all frames."""

    def __init__(self, reward: Reward) -> None:
        super().__init__(reward, n=1)


def mean_over_frames(score: Callable[[Tensor], Tensor], videos: Tensor, frames: Sequence[int]) -> Tensor:
    """Mean over ``frames`` of ``score(videos[:, :, f])``, one frame of all ``videos [N, 3, F, H, W]`` at a time -> ``[N]``.

    Errors: ``ValueError`` on videos without frames.
    """
    if not videos.shape[2]:
        raise ValueError(f"videos of shape {tuple(videos.shape)} have no frames")
    return torch.stack([score(videos[:, :, frame]).double() for frame in frames]).mean(0)

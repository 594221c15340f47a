"""What a reward is tried on before it trains a model, one function per fault that it may have.

A probe takes a :class:`Bench`, returns what it saw (None: it does not apply to this reward) and raises :class:`Refused`
with the reason. :mod:`rewards.check` runs them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from rewards.base import Reward
from rewards.known_pairs import Pair
from rewards.video import VideoReward

_FRAMES = 8  # of the still videos that a video reward is tried on


class Refused(Exception):
    """The reward is not fit to train on; the message says why."""


@dataclass(kw_only=True)
class Bench:
    """A reward and what it is tried on."""

    reward: Reward
    reads: str
    """What it depends on (:mod:`rewards.check`)."""
    pairs: Sequence[Pair]
    good: bool
    """Do the pairs' prompts fit their images?"""
    tolerance: float
    """Largest difference of scores that should be equal, relative to 1 or the score."""
    device: str
    scores: Tensor = field(init=False)
    """Of the pairs, ``[N]``; filled in by the probe "finite"."""
    plain: dict[str, float] = field(init=False)
    """Mean score of an image with nothing to see, over the pairs' prompts; filled in by the probe "finite"."""

    def score(self, images: Tensor, order: Sequence[int] | None = None) -> Tensor:
        """``images [N, 3, H, W]``, image i with the prompt of pair ``order[i]`` (default: its own) -> ``[N]``."""
        return self.ask(self.arrange(images), order)

    def arrange(self, images: Tensor) -> Tensor:
        """``images [N, 3, H, W]`` as the reward takes them: on the device; still videos for a video reward."""
        if isinstance(self.reward, VideoReward):
            images = images.unsqueeze(2).expand(-1, -1, _FRAMES, -1, -1)
        return images.to(self.device).contiguous()

    def ask(self, arranged: Tensor, order: Sequence[int] | None = None) -> Tensor:
        """:meth:`score` of images that are arranged."""
        rows = [self.pairs[i] for i in (range(len(arranged)) if order is None else order)]
        return self.reward(arranged, [row.prompt for row in rows], [row.metadata for row in rows])

    @property
    def images(self) -> Tensor:
        return torch.stack([pair.image for pair in self.pairs])

    def differ(self, scores: Tensor, others: Tensor) -> float | None:
        """The largest difference, relative to 1 or the larger score; None if within the tolerance."""
        gap = ((scores - others).abs() / others.abs().clamp(min=1.0)).max().item()
        return None if gap <= self.tolerance else gap


def _refuses_wrong_ranges(bench: Bench) -> str:
    """Images outside [0, 1], or no float images, are an error and no score."""
    images = bench.images
    images[:, :, 0, 0], images[:, :, -1, -1] = 0.0, 1.0  # so that a blank image, too, leaves the range
    wrong = {
        "in [-1, 1]": images * 2 - 1,
        "in [0, 255]": images * 255,
        "of integers": (images * 255).byte(),
        "with NaN": torch.where(images == 1.0, math.nan, images),
    }
    for name, values in wrong.items():
        try:
            bench.score(values)
        except ValueError:
            continue
        raise Refused(
            f"images {name} get a score; raise ValueError, as Reward.__call__ does, unless they are in [0, 1]"
        )
    return "refuses images " + ", ".join(wrong)


def _is_finite(bench: Bench) -> str:
    """Finite, and not the same for everything."""
    images = bench.images
    noise = torch.rand(images.shape[1:], generator=torch.Generator().manual_seed(0))
    plain = {"black": torch.zeros_like(noise), "white": torch.ones_like(noise), "noise": noise}
    scores = {name: bench.score(image.expand_as(images)) for name, image in plain.items()}
    scores["drawn"] = bench.scores = bench.score(images)
    for name, values in scores.items():
        if not bool(values.isfinite().all()):
            raise Refused(f"{name} images get the scores {values.tolist()}")
    means = {name: values.mean().item() for name, values in scores.items()}
    if bench.good and torch.cat(list(scores.values())).unique().numel() == 1:
        raise Refused(f"every image gets {means['noise']:.4g}: such a reward teaches nothing")
    bench.plain = {name: means[name] for name in plain}
    return ", ".join(f"{name} {value:.4g}" for name, value in means.items())


def _is_deterministic(bench: Bench) -> str:
    """The same images twice get the same scores, and stay as they were."""
    images = bench.arrange(bench.images)
    kept = images.clone()
    gap = bench.differ(bench.ask(images), bench.scores)
    if gap is not None:
        raise Refused(f"the same images get scores that differ by {gap:.2g}; seed or remove its randomness")
    if not torch.equal(images, kept):
        raise Refused("the reward changes the images it is given; work on a copy")
    return "the same scores twice"


def _ignores_the_batch(bench: Bench) -> str:
    """One by one and in another order, each image gets the same score."""
    count = len(bench.pairs)
    images, backwards = bench.images, list(reversed(range(count)))
    alone = torch.cat([bench.score(images[i : i + 1], [i]) for i in range(count)])
    for name, scores in (
        ("one by one", alone),
        ("in reverse order", bench.score(images[backwards], backwards)[backwards]),
    ):
        gap = bench.differ(scores, bench.scores)
        if gap is not None:
            raise Refused(f"scored {name} instead of together, scores differ by {gap:.2g}; keep samples apart")
    return f"one by one, in reverse and together: equal to {bench.tolerance:.0e}"


def _orders_prompts(bench: Bench) -> str | None:
    """An image with its own prompt scores above the image with the others'; or, if only the image is read, the same."""
    if not bench.good:
        return None
    count = len(bench.pairs)
    shifted = [[(i + shift) % count for i in range(count)] for shift in range(1, count)]
    shuffled = torch.stack([bench.score(bench.images, order) for order in shifted])
    if bench.reads == "image":
        if bench.differ(shuffled, bench.scores.expand_as(shuffled)) is not None:
            raise Refused("the score depends on the prompt: declare what the reward reads by its attribute `reads`")
        return "prompts change nothing"
    own, others = bench.scores.mean().item(), shuffled.mean().item()
    if not own > others:
        raise Refused(
            f"images score {own:.4g} with their own prompts and {others:.4g} with others': the reward does not follow the "
            "prompt; if it is not meant to, declare `reads = 'image'` on its class"
        )
    return f"own prompts {own:.4g}, shuffled {others:.4g}"


def _orders_images(bench: Bench) -> str | None:
    """What a prompt describes scores above blank images and noise."""
    if not bench.good or bench.reads == "image":
        return None
    own = bench.scores.mean().item()
    for name, value in bench.plain.items():
        if not own > value:
            raise Refused(f"{name} images score {value:.4g}, images that fit their prompts {own:.4g}")
    return f"known-good {own:.4g}, " + ", ".join(f"{name} {value:.4g}" for name, value in bench.plain.items())


PROBES: dict[str, Callable[[Bench], str | None]] = {
    "range": _refuses_wrong_ranges,
    "finite": _is_finite,
    "deterministic": _is_deterministic,
    "batch": _ignores_the_batch,
    "prompts": _orders_prompts,
    "images": _orders_images,
}

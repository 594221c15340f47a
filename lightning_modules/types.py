"""Frozen records that cross borders between rooms. Notation used in every shape below:

B  prompts of an iteration          N  rows of a batch (one row = one generation of one prompt)
M  generations per prompt (group)   T  denoising steps
S  trained steps of a row           ``*latent`` = ``[C, H, W]`` (image) or ``[C, F, H, W]`` (video)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

Metadata = dict[str, Any]


@dataclass(kw_only=True)
class PromptBatch:
    """The prompts of one iteration, as the datamodule yields them. Never a tensor, so no device transfer.

    Not frozen only because Lightning's precision plugins rebuild every batch and refuse frozen dataclasses.
    """

    prompts: tuple[str, ...]
    """[B] text."""
    metadata: tuple[Metadata, ...]
    """[B] what the prompt file says beside the prompt; handed to the rewards unread."""
    iteration: int
    """0-based iteration these prompts were drawn for."""

    def __post_init__(self) -> None:
        if len(self.prompts) != len(self.metadata):
            raise ValueError(f"{len(self.prompts)} prompts but {len(self.metadata)} metadata entries")

    def __len__(self) -> int:
        return len(self.prompts)


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """What the policy is conditioned on: named tensors with the same leading dimension, all detached."""

    tensors: dict[str, Tensor]
    """name -> ``[N, ...]``."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def rows(self, index: Tensor) -> Conditioning:
        """Rows ``index`` (``[n]``, int64, repeats allowed) of every tensor."""
        return Conditioning(tensors={k: v.index_select(0, index.to(v.device)) for k, v in self.tensors.items()})

    def to(self, device: torch.device | str) -> Conditioning:
        return Conditioning(tensors={k: v.to(device) for k, v in self.tensors.items()})


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Which generations a batch holds: the ids that travel with every tensor of it."""

    prompt: Tensor
    """[N] int64, position of the row's prompt in the iteration, 0..B-1."""
    generation: Tensor
    """[N] int64, index of the row in its prompt's group, 0..M-1."""

    def __len__(self) -> int:
        return len(self.prompt)

    def __getitem__(self, index: Tensor | slice) -> Rows:
        return Rows(prompt=self.prompt[index], generation=self.generation[index])

    @staticmethod
    def joined(parts: Sequence[Rows]) -> Rows:
        """One after the other."""
        return Rows(prompt=torch.cat([r.prompt for r in parts]), generation=torch.cat([r.generation for r in parts]))

    def order(self) -> Tensor:
        """[N] positions that sort the rows by prompt and generation."""
        return torch.argsort(self.prompt * (int(self.generation.max()) + 1) + self.generation)


@dataclass(frozen=True, kw_only=True)
class Peers:
    """What all ranks do in the round that a request is one rank's share of."""

    rows: Rows
    """[n] ids of the round's rows on all ranks."""
    trained: Tensor
    """[n, T] bool, the steps they train."""
    most_trained: tuple[int, ...]
    """[T] the largest number of rows that a rank trains at that step."""
    any_free: tuple[bool, ...]
    """[T] whether a rank has rows that do not train at that step."""
    in_step: bool
    """Whether every rank must make the same policy calls."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """One micro-batch to roll out: who is in it, what it is conditioned on, where its randomness comes from.

    It may be empty (N = 0) where other ranks have rows in this round; if the ranks must keep step, the policy is called
    all the same, as often as by the busiest of them.
    """

    rows: Rows
    """[N] ids."""
    conditioning: Conditioning
    """N rows, detached."""
    initial: Tensor
    """``[N, *latent]`` noise the rollout starts from, in the dtype latents are stored in."""
    noise: Callable[[int], Tensor]
    """step -> ``[N, *latent]`` standard normal noise of that step."""
    trained: Tensor
    """[N, T] bool, the steps whose log-probability is trained; each of them is stochastic."""
    stochastic: Tensor
    """[N, T] bool, the steps sampled from the SDE; the others are ODE steps."""
    peers: Peers | None = None
    """of all ranks, where there are several."""

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def in_step(self) -> bool:
        """Whether the policy is to be called as often as by the busiest rank."""
        return self.peers is not None and self.peers.in_step

    @property
    def round_rows(self) -> int:
        """Rows of all ranks in this round."""
        return len(self) if self.peers is None else len(self.peers.rows)

    def trained_calls(self, step: int) -> int:
        """Rows to be trained at ``step``, of this rank or, if ranks keep step, of the one that has most."""
        return self.peers.most_trained[step] if self.peers and self.in_step else int(self.trained[:, step].sum())

    def free_call(self, step: int) -> bool:
        """Whether a policy call is made for rows that do not train at ``step``."""
        return self.peers.any_free[step] if self.peers and self.in_step else not bool(self.trained[:, step].all())


@dataclass(frozen=True, kw_only=True)
class Step:
    """One trained transition ``x_t -> x_{t+1}`` of some rows of a micro-batch."""

    step: int
    """0-based index into the sigma grid; never looked up by value."""
    index: Tensor
    """[n] int64, the rows of the micro-batch that train this step."""
    latents: Tensor
    """``[n, *latent]``, x_t as stored."""
    next_latents: Tensor
    """``[n, *latent]``, x_{t+1} as stored: rounded BEFORE its log-probability was taken."""
    log_prob: Tensor
    """[n], mean over the latent's dimensions. Carries its graph under Retain, is detached elsewhere."""
    kl: Tensor | None = None
    """[n], KL to the reference policy with its graph; Retain only, and only when beta > 0."""

    def detached(self) -> Step:
        """The same step without its graph."""
        return replace(self, log_prob=self.log_prob.detach(), kl=None)

    def slice(self, start: int, stop: int) -> Step:
        """Rows ``start:stop`` of the step, as plain views."""
        part = slice(start, stop)
        return replace(
            self,
            index=self.index[part],
            latents=self.latents[part],
            next_latents=self.next_latents[part],
            log_prob=self.log_prob[part],
            kl=None if self.kl is None else self.kl[part],
        )


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """A finished micro-batch. ``steps`` is emptied by :meth:`release`, which frees every graph it holds."""

    request: Request
    latents: Tensor
    """``[N, *latent]``, clean latents, detached."""
    steps: list[Step]
    """trained transitions in time order."""

    def __len__(self) -> int:
        return len(self.request)

    def release(self) -> None:
        self.steps.clear()


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Finished generations on their way to the rewards."""

    images: Tensor
    """``[N, 3, H, W]`` (or video ``[N, 3, F, H, W]``), float in [0, 1]."""
    prompts: tuple[str, ...]
    """[N] text."""
    metadata: tuple[Metadata, ...]
    """[N]."""
    rows: Rows
    """[N] ids."""

    def __len__(self) -> int:
        return len(self.prompts)

    @staticmethod
    def joined(parts: Sequence[Samples]) -> Samples:
        """One after the other, then ordered by prompt and generation."""
        rows = Rows.joined([part.rows for part in parts])
        order = rows.order()
        prompts = [prompt for part in parts for prompt in part.prompts]
        metadata = [row for part in parts for row in part.metadata]
        images = torch.cat([part.images for part in parts])
        return Samples(
            images=images[order.to(images.device)],
            prompts=tuple(prompts[k] for k in order.tolist()),
            metadata=tuple(metadata[k] for k in order.tolist()),
            rows=rows[order],
        )

    def to(self, device: torch.device | str, **options: Any) -> Samples:
        """The same samples with their images there (Lightning moves what ``predict`` returns)."""
        return replace(self, images=self.images.to(device, **options))


@dataclass(frozen=True, kw_only=True)
class DrawingSettings:
    """How an evaluation draws its images, where it differs from the module and its policy; ``None``: as they do.

    Errors: ``ValueError`` on a number of steps or a size below 1.
    """

    num_steps: int | None = None
    """steps of the deterministic sampler."""
    guidance: float | None = None
    """scale; 1 = the prompt alone."""
    height: int | None = None
    """of the images, pixels."""
    width: int | None = None
    """of the images, pixels."""

    def __post_init__(self) -> None:
        for name in ("num_steps", "height", "width"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value}: give an integer of at least 1, or null")


@dataclass(kw_only=True)
class Scores:
    """One score vector per named reward: filled in by the scoring callbacks, read by the shell.

    The one mutable record, because several callbacks may contribute to the same samples.
    """

    values: dict[str, Tensor] = field(default_factory=dict)
    """name -> [N] float64 on the CPU. NaN = this sample has no score and is dropped (the scorer has already warned)."""
    weights: dict[str, float] = field(default_factory=dict)
    """name -> weight in the total reward; 0 = only monitored. A name without a weight has 1."""
    applies: dict[str, Tensor] = field(default_factory=dict)
    """name -> [N] bool, the samples that this reward is meant for, the same for all of a prompt; a name without an entry is
    meant for all. Elsewhere its value is not looked at, and the sample is not dropped."""
    pending: list[Callable[[], Any]] = field(default_factory=list)
    """what the shell calls before it reads ``values``, and lets raise: a scorer that works in the background waits here."""

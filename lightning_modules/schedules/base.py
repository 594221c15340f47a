"""When a rollout's gradient is formed. Every schedule gives the gradient of the same loss,

    L = 1/N  sum over (prompt b, generation m, trained step t) of   w_t * surrogate(A_bm, log p_t)  +  beta * KL_t

with N the number of ALL such triples of the update, whatever is dropped, skipped or split: with one optimizer step per
rollout the policy has not moved, the ratio is 1, and the policy term's gradient is ``-A w_t / N * grad log p_t``
(LeanGRPO, arXiv 2609.03528, sections 3-4).

The shell's side of the contract, per iteration::

    begin(normaliser)
    for each chunk of groups:   rollout(request) per micro-batch [, absorb(rollout, rewards)] [, fold(rollouts, rows, rewards)],
                                then backward(rollouts, advantages), then close()
    finish(scale)               the gradient is in the parameters' .grad
    release()                   always, also after an exception

On several ranks every rank does this for its own rows, N being that of all; the gradients of the ranks are added up
where ``sync`` says, never before they are corrected. Where a rank must make the same policy calls as the others (its
weights are sharded, or every step is reduced) requests carry ``peers``, and a rank without rows for a call makes it with
none: what such a call adds to the gradient is exactly zero.

Schedules know no Lightning: how to backpropagate is handed in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from lightning_modules.advantages import Advantages, GroupAdvantage
from lightning_modules.flow.denoise import ReverseProcess, Velocity, draw
from lightning_modules.parallel.gradients import Gradient, LocalGradients
from lightning_modules.telemetry import Tally
from lightning_modules.types import Conditioning, Request, Rollout, Rows, Step

Sync = Literal["per_step", "per_group", "per_update"]
"""When the ranks' gradients are added up: after each trained step of each micro-batch (what a loop of backward calls
does that does not hold synchronisation back), after each chunk of complete groups, or once."""


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a schedule works with for a whole run."""

    process: ReverseProcess
    """the reverse process of the policy being trained."""
    gradients: LocalGradients
    """where its gradients are held."""
    backward: Callable[..., None]
    """``backward(loss, retain_graph=False)``: Lightning's ``manual_backward``, or ``Tensor.backward`` without it."""
    advantage: GroupAdvantage
    """only its properties are read, to choose how to hold gradients."""
    generations: int
    """M, the size of a whole group."""
    reward_weights: tuple[float, ...] | None = None
    """of the weighted rewards; ``None``: unknown."""
    step_weights: Tensor
    """[T] float64."""
    clip_range: float = 1e-4
    """half-width of the clip around ratio 1."""
    beta: float = 0.0
    """weight of the KL to the reference policy."""
    reference: Velocity | None = None
    """the reference policy's velocity, without gradients; needed when beta > 0."""
    sync: Sync = "per_update"
    """when the ranks' gradients are added up."""


class Schedule(ABC):
    """Base of Native, Retain and Reweight."""

    lean = True
    """Whether the gradient is formed without a second policy forward."""

    updates_per_rollout = 1
    """Optimizer steps per rollout."""

    mixes_samples_late = False
    """Whether a gradient is held per sample and only means something once it is corrected by the advantage."""

    wants_rewards_early = False
    """Whether :meth:`absorb` must be given each micro-batch's rewards right after its rollout."""

    wants_every_round = False
    """Whether :meth:`fold` must be called after every round, as soon as all ranks know its rewards."""

    def bind(self, context: Context) -> None:
        """Take the run's context. Errors: ``ValueError`` where this schedule would not be exact, with the remedy."""
        if context.beta > 0 and context.reference is None:
            raise ValueError(f"beta={context.beta} needs a reference policy")
        if context.sync == "per_step" and self.mixes_samples_late:
            raise ValueError(
                f"sync: per_step would add up gradients that {type(self).__name__} has not corrected yet; use per_group or "
                "per_update"
            )
        self.context = replace(
            context, process=replace(context.process, velocity=self._counted(context.process.velocity))
        )
        self.begin(1)

    def begin(self, normaliser: int) -> None:
        """Start the gradient of one update. ``normaliser``: N, its (prompt, generation, trained step) triples."""
        self.normaliser = normaliser
        self.total = self.context.gradients.buffer()
        """This rank's gradient, not added up with the others' yet."""
        self.reduced = self.context.gradients.buffer()
        """What has been added up over the ranks."""
        self.kl_total = self.context.gradients.buffer()
        self.forward_rows = self.backward_rows = 0
        self.kl_sum, self.kl_count = 0.0, 0

    @abstractmethod
    def rollout(self, request: Request) -> Rollout:
        """Sample one micro-batch, recording its trained steps."""

    def absorb(self, rollout: Rollout, rewards: Tensor) -> None:
        """``rewards [N]`` or ``[N, K]`` float64 (NaN = dropped) of a rollout, before its group is complete: what the advantage
        is affine in."""
        assert not self.wants_rewards_early, f"{type(self).__name__} wants rewards early but does not take them"

    def fold(self, rollouts: Sequence[Rollout], rows: Rows, rewards: Tensor) -> None:
        """Let go of what these rollouts of one round hold for groups that stay open after it. ``rows``, ``rewards [n, K]``
        float64 (NaN = dropped): of those groups, as far as they are known, the same on all ranks."""
        assert not self.wants_every_round, f"{type(self).__name__} wants every round but does not take it"

    @abstractmethod
    def backward(self, rollouts: Sequence[Rollout], advantages: Advantages) -> None:
        """Add the gradient of these rollouts, whose groups are complete, and free what they hold."""

    def updates(self, rollouts: Sequence[Rollout]) -> Iterator[Sequence[Rollout]]:
        """The rollouts of each optimizer step, when all of the iteration's are held."""
        yield rollouts

    def close(self) -> None:
        """A chunk's groups are backpropagated: add their gradient up over the ranks, if that is due."""
        if self.context.sync == "per_group":
            self._reduce()

    def finish(self, scale: float = 1.0) -> None:
        """Deliver the gradient of all ranks, its policy term multiplied by ``scale`` (global std, known only now; the KL
        term is no function of the rewards and is not)."""
        if scale == 1.0:
            self.total.add_(self.kl_total)
            self.kl_total.clear()
        self._reduce()
        if scale != 1.0:
            self.reduced.mul_(scale)
            self.reduced.add_(self.context.gradients.reduce(self.kl_total))
        self.context.gradients.deliver(self.reduced)

    def release(self) -> None:
        """Drop every gradient and statistic held for the iteration. The rollouts' graphs are the caller's to release."""
        self.total.clear()
        self.reduced.clear()
        self.kl_total.clear()

    def tally(self) -> Tally:
        """What the last update cost and showed on this rank."""
        return Tally(
            totals={"rows/forward": self.forward_rows, "rows/backward": self.backward_rows},
            means={"kl": (self.kl_sum, self.kl_count)},
        )

    @torch.no_grad()
    def verify(self, rollout: Rollout, max_steps: int = 3) -> dict[int, float]:
        """Re-forward some trained steps of a rollout -> step: largest ``|ratio - 1|``. Meant for lean schedules, whose
        claim is that this forward is redundant; valid until the optimizer steps."""
        chosen = rollout.steps[:: max(1, len(rollout.steps) // max_steps)][:max_steps]
        return {s.step: ratio_deviation(self._rescore(rollout.request, s)[0], s.log_prob) for s in chosen}

    # shared by the schedules

    def _reduce(self) -> None:
        part = self.context.gradients.reduce(self.total)
        if self.reduced.empty:
            self.reduced = part
        else:
            self.reduced.add_(part)

    def _after_step(self) -> None:
        """One trained step of one micro-batch is backpropagated, or found to add nothing."""
        if self.context.sync == "per_step":
            self._reduce()

    def _transition(
        self, request: Request, step: int, index: Tensor, latents: Tensor, noise: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """One trained step in the caller's gradient mode -> next latents (detached), log-prob ``[n]``, KL ``[n]``."""
        conditioning = request.conditioning.rows(index)
        process = self.context.process
        mean, std = process.moments(step, latents, conditioning)
        after = draw(mean, std, noise, latents.dtype)
        log_prob = process.transition.log_prob(after, mean, std)
        return after, log_prob, self._kl(step, latents, conditioning, mean, std) if torch.is_grad_enabled() else None

    def _rescore(self, request: Request, step: Step) -> tuple[Tensor, Tensor | None]:
        """Run the policy AGAIN on a recorded step -> log-prob ``[n]`` and KL ``[n]`` in the caller's gradient mode."""
        conditioning = request.conditioning.rows(step.index)
        process = self.context.process
        mean, std = process.moments(step.step, step.latents, conditioning)
        log_prob = process.transition.log_prob(step.next_latents, mean, std)
        kl = self._kl(step.step, step.latents, conditioning, mean, std) if torch.is_grad_enabled() else None
        return log_prob, kl

    def _kl(self, step: int, latents: Tensor, conditioning: Conditioning, mean: Tensor, std: Tensor) -> Tensor | None:
        if not self.context.beta > 0:
            return None
        process = self.context.process
        with torch.no_grad():
            reference_mean, _ = process.moments(step, latents, conditioning, self.context.reference)
        kl = process.transition.kl(mean, reference_mean, std)
        self.kl_sum += kl.detach().sum().item()
        self.kl_count += len(kl)
        return kl

    def _coefficient(self, rollout: Rollout, step: Step, advantages: Advantages) -> Tensor:
        """``c_i = -A_i w_t / N``, ``[n]`` in the log-prob's dtype; -0.0 where the advantage is exactly zero."""
        rows = rollout.request.rows[step.index]
        values = advantages.of(rows.prompt, rows.generation)
        weight = self.context.step_weights[step.step].item() / self.normaliser
        return (-values * weight).to(step.log_prob)

    def _idle(self, rollout: Rollout, step: Step, coefficient: Tensor, advantages: Advantages) -> bool:
        """Whether these rows add nothing: every advantage is exactly zero and there is no KL term. Where ranks keep step,
        whether that is so on all of them."""
        if self.context.beta > 0:
            return False
        peers = rollout.request.peers
        if peers is None or not peers.in_step:
            return not coefficient.any()
        rows = peers.rows[peers.trained[:, step.step]]
        return not advantages.of(rows.prompt, rows.generation).any()

    def _accumulate(self, policy_loss: Tensor, kl: Tensor | None) -> None:
        """Backpropagate one step of one micro-batch: ``policy_loss [n]`` and the step's KL ``[n]``."""
        rows = len(policy_loss)
        if kl is None:
            self._backward(policy_loss.sum(), rows, self.total)
            return
        kl_loss = kl.sum() * (self.context.beta / self.normaliser)
        if self.context.advantage.deferred:  # the two terms are scaled apart at the end
            self._backward(policy_loss.sum(), rows, self.total, retain_graph=True)
            self._backward(kl_loss, rows, self.kl_total)
        else:
            self._backward(policy_loss.sum() + kl_loss, rows, self.total)

    def _backward(self, loss: Tensor, rows: int, into: Gradient, retain_graph: bool = False) -> None:
        self.backward_rows += rows
        with self.context.gradients.into(into):
            self.context.backward(loss, retain_graph=retain_graph)

    def _counted(self, velocity: Velocity) -> Velocity:
        def count_rows(latents: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
            self.forward_rows += len(latents)
            return velocity(latents, sigma, conditioning)

        return count_rows


def ratio_deviation(log_prob: Tensor, rollout_log_prob: Tensor) -> float:
    """Largest ``|p_theta / p_rollout - 1|`` over the rows; 0 if there are none."""
    return torch.expm1(log_prob - rollout_log_prob).abs().max().item() if len(log_prob) else 0.0

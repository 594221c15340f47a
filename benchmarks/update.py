"""One update of a schedule without Lightning: rollout, scoring, backward and correction of one iteration. Afterwards the
gradient, before clipping, is in the parameters' ``.grad``.

The training loop in ``lightning_modules.lean_grpo`` does the same and logs, checkpoints and announces besides; here a
caller can look at gradients tensor by tensor, put its own clock around each phase, and hand in the rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_modules.advantages import Advantages, GroupAdvantage
from lightning_modules.flow.denoise import ReverseProcess
from lightning_modules.flow.noise import KeyedNoise
from lightning_modules.flow.sigmas import Sigmas
from lightning_modules.flow.transitions import Transition
from lightning_modules.flow.windows import Window
from lightning_modules.objectives.step_weights import ConstantStepWeights, StepWeights
from lightning_modules.parallel.gradients import LocalGradients
from lightning_modules.policies.base import Policy, Reference
from lightning_modules.schedules.base import Context, Schedule
from lightning_modules.types import Request, Rollout, Rows

Score = Callable[[Rollout], Tensor]
"""A finished micro-batch -> its rewards ``[N]`` float64; NaN drops a sample."""

Clock = Callable[[str], AbstractContextManager[None]]
"""Name of a phase -> a context in which it runs. Phases: ``rollout``, ``backward`` (also inside the other two),
``update`` (recomputation, correction). Scoring is the caller's and so is its clock."""


def untimed(phase: str) -> AbstractContextManager[None]:
    """The clock of those who do not measure."""
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Finished:
    """What an update leaves beside the gradient."""

    rollouts: list[Rollout]
    """all micro-batches in order, without graphs."""
    rewards: Tensor
    """[B, M] float64."""

    @property
    def latents(self) -> Tensor:
        """``[B M, *latent]`` clean latents, prompt by prompt."""
        return torch.cat([rollout.latents for rollout in self.rollouts])


class Update:
    """Everything an update depends on but the schedule and the rewards.

    Args:
        policy: the generator; put into eval mode.
        prompts: [B] text.
        generations: M.
        transition, sigmas, num_steps, window, advantage, step_weights, beta, reference, clip_range: as in ``LeanGRPO``.
        micro_batch: rows per policy call; ``None``: all rows in flight.
        groups_in_flight: prompts rolled out before their backward.
        seed: key of all noise.
        dtype: of the stored latents.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        prompts: Sequence[str],
        generations: int,
        transition: Transition,
        sigmas: Sigmas,
        num_steps: int,
        window: Window,
        advantage: GroupAdvantage,
        step_weights: StepWeights | None = None,
        beta: float = 0.0,
        reference: Reference | None = None,
        clip_range: float = 1e-4,
        micro_batch: int | None = None,
        groups_in_flight: int = 1,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.policy, self.prompts, self.generations = policy.eval(), list(prompts), generations
        self.transition, self.window, self.advantage = transition, window, advantage
        self.num_steps, self.sigmas = num_steps, sigmas(num_steps, policy.num_tokens)
        weights = step_weights or ConstantStepWeights()
        self.step_weights = weights(transition, self.sigmas, window.candidates(num_steps))
        self.beta, self.reference, self.clip_range = beta, reference, clip_range
        self.micro_batch, self.groups_in_flight, self.seed, self.dtype = micro_batch, groups_in_flight, seed, dtype

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        return [p for p in self.policy.parameters() if p.requires_grad]

    @property
    def normaliser(self) -> int:
        """N, the (prompt, generation, trained step) triples of the update."""
        return len(self.prompts) * self.generations * self.window.size(self.num_steps)

    @property
    def process(self) -> ReverseProcess:
        return ReverseProcess(velocity=self.policy, transition=self.transition, sigmas=self.sigmas)

    def __call__(self, schedule: Schedule, score: Score, *, iteration: int = 0, clock: Clock = untimed) -> Finished:
        """Form the gradient of iteration ``iteration``'s trajectories under ``schedule``."""
        for p in self.parameters:
            p.grad = None
        schedule.bind(self._context(clock))
        schedule.begin(self.normaliser)
        rewards = torch.full((len(self.prompts), self.generations), torch.nan, dtype=torch.float64)
        held: list[Rollout] = []
        for start in range(0, len(self.prompts), self.groups_in_flight):
            chunk = self.rows(start, start + self.groups_in_flight)
            rollouts = []
            for rows in self._micro_batches(chunk):
                with clock("rollout"):
                    rollouts.append(schedule.rollout(self.request(rows, iteration)))
                rewards[rows.prompt, rows.generation] = scores = score(rollouts[-1])
                if schedule.wants_rewards_early:
                    with clock("update"):
                        schedule.absorb(rollouts[-1], scores)
            held += rollouts
            if not self.advantage.needs_iteration:
                with clock("update"):
                    schedule.backward(rollouts, self.advantages(rewards, chunk))
        with clock("update"):
            if self.advantage.needs_iteration:
                schedule.backward(held, self.advantages(rewards, self.rows(0, len(self.prompts))))
            schedule.finish(self.advantage.final_scale(rewards.flatten()))
        return Finished(rollouts=held, rewards=rewards)

    def rows(self, start: int, stop: int) -> Rows:
        """The rows of prompts ``start`` to ``stop``, group by group."""
        prompts = torch.arange(start, min(stop, len(self.prompts)))
        return Rows(
            prompt=prompts.repeat_interleave(self.generations),
            generation=torch.arange(self.generations).repeat(len(prompts)),
        )

    def request(self, rows: Rows, iteration: int = 0) -> Request:
        """One micro-batch, with its noise."""
        noise = KeyedNoise(seed=self.seed, iteration=iteration, rows=rows, latent_shape=self.policy.latent_shape)
        trained = self.window.trained(self.num_steps, seed=self.seed, iteration=iteration, rows=rows)
        return Request(
            rows=rows,
            conditioning=self.policy.encode([self.prompts[p] for p in rows.prompt.tolist()]),
            initial=noise.initial().to(self.policy.device, self.dtype),
            noise=noise,
            trained=trained,
            stochastic=self.window.stochastic(trained),
        )

    def advantages(self, rewards: Tensor, rows: Rows) -> Advantages:
        """Of the whole groups ``rows``, from ``rewards [B, M]``."""
        return self.advantage(rewards[rows.prompt, rows.generation], rows.prompt, rows.generation)

    def _micro_batches(self, chunk: Rows) -> Iterator[Rows]:
        size = self.micro_batch or len(chunk)
        for start in range(0, len(chunk), size):
            yield chunk[slice(start, start + size)]

    def _context(self, clock: Clock) -> Context:
        def backward(loss: Tensor, retain_graph: bool = False) -> None:
            with clock("backward"):
                loss.backward(retain_graph=retain_graph)

        return Context(
            process=self.process,
            gradients=LocalGradients(self.parameters),
            backward=backward,
            advantage=self.advantage,
            generations=self.generations,
            step_weights=self.step_weights,
            clip_range=self.clip_range,
            beta=self.beta,
            reference=self.reference,
        )

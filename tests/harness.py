"""One update of a schedule without Lightning, with given rewards, so that gradients can be compared tensor by tensor."""

from __future__ import annotations

import torch

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.denoise import ReverseProcess
from lightning_modules.flow.noise import KeyedNoise
from lightning_modules.flow.sigmas import LinearSigmas
from lightning_modules.flow.transitions import FlowSDE
from lightning_modules.flow.windows import AllButLast
from lightning_modules.objectives.step_weights import ConstantStepWeights
from lightning_modules.parallel.gradients import LocalGradients
from lightning_modules.schedules.base import Context
from lightning_modules.types import Request, Rows

PROMPTS = ("a red circle", "two blue squares", "a cross left of a ring")


def backward(loss, retain_graph=False):
    loss.backward(retain_graph=retain_graph)


class Update:
    """Everything an update depends on; calling it with a schedule forms the gradient in ``policy``'s ``.grad``."""

    def __init__(
        self, policy, rewards, *, transition=None, window=None, advantage=None, step_weights=None, beta=0.0,
        reference=None, num_steps=4, micro_batch=None, groups_in_flight=1, seed=0, dtype=torch.float32, clip_range=1e-4,
        texts=PROMPTS,
    ):  # fmt: skip
        self.policy, self.rewards = policy.eval(), torch.as_tensor(rewards, dtype=torch.float64)
        self.transition, self.window = transition or FlowSDE(0.7), window or AllButLast()
        self.advantage = advantage or GroupAdvantage()
        self.sigmas = LinearSigmas(3.0)(num_steps)
        weights = step_weights or ConstantStepWeights()
        self.step_weights = weights(self.transition, self.sigmas, self.window.candidates(num_steps))
        self.beta, self.reference, self.clip_range = beta, reference, clip_range
        self.micro_batch, self.groups_in_flight, self.seed, self.dtype = micro_batch, groups_in_flight, seed, dtype
        self.num_steps, self.texts = num_steps, texts
        self.prompts, self.generations = self.rewards.shape

    @property
    def parameters(self):
        return [p for p in self.policy.parameters() if p.requires_grad]

    def context(self):
        return Context(
            process=ReverseProcess(velocity=self.policy, transition=self.transition, sigmas=self.sigmas),
            gradients=LocalGradients(self.parameters), backward=backward, advantage=self.advantage,
            generations=self.generations, step_weights=self.step_weights, clip_range=self.clip_range, beta=self.beta,
            reference=self.reference,
        )  # fmt: skip

    def requests(self, prompts):
        m = self.generations
        chunk = Rows(prompt=torch.tensor(prompts).repeat_interleave(m), generation=torch.arange(m).repeat(len(prompts)))
        size = self.micro_batch or len(chunk)
        for start in range(0, len(chunk), size):
            rows = chunk[slice(start, start + size)]
            noise = KeyedNoise(seed=self.seed, iteration=0, rows=rows, latent_shape=self.policy.latent_shape)
            trained = self.window.trained(self.num_steps, seed=self.seed, iteration=0, rows=rows)
            yield Request(
                rows=rows, conditioning=self.policy.encode([self.texts[p] for p in rows.prompt.tolist()]),
                initial=noise.initial().to(self.dtype), noise=noise, trained=trained,
                stochastic=self.window.stochastic(trained),
            )  # fmt: skip

    def __call__(self, schedule, bind=True):
        if bind:
            schedule.bind(self.context())
        for p in self.parameters:
            p.grad = None
        total = self.prompts * self.generations * self.window.size(self.num_steps)
        schedule.begin(total)
        hold, held = self.advantage.needs_iteration, []
        for start in range(0, self.prompts, self.groups_in_flight):
            prompts = list(range(start, min(start + self.groups_in_flight, self.prompts)))
            rollouts = []
            for request in self.requests(prompts):
                rollouts.append(schedule.rollout(request))
                if schedule.wants_rewards_early:
                    schedule.absorb(rollouts[-1], self.rewards[request.rows.prompt, request.rows.generation])
            held += rollouts
            if not hold:
                schedule.backward(rollouts, self.advantages(prompts))
        if hold:
            schedule.backward(held, self.advantages(list(range(self.prompts))))
        self.latents = torch.cat([r.latents for r in held])
        schedule.finish(self.advantage.final_scale(self.rewards.flatten()))
        return [None if p.grad is None else p.grad.clone() for p in self.parameters]

    def advantages(self, prompts):
        m = self.generations
        rows = Rows(prompt=torch.tensor(prompts).repeat_interleave(m), generation=torch.arange(m).repeat(len(prompts)))
        return self.advantage(self.rewards[prompts].flatten(), rows.prompt, rows.generation)


def flat(gradient):
    return torch.cat([g.flatten().double() for g in gradient if g is not None])


def relative(ours, theirs):
    """Relative L2 distance."""
    ours, theirs = flat(ours), flat(theirs)
    return ((ours - theirs).norm() / theirs.norm()).item()

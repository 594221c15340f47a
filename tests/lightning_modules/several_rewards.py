"""Several rewards: data that meet every case, an independent reference for the advantages in NumPy and plain loops, and an
update of a schedule with them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from lightning_modules.advantages import Rewards
from tests.harness import Update

WEIGHTS = (1.0, 0.3, -0.5)
CASES = ("whole", "dropped", "routed", "routed and dropped")


def table(case, prompts=3, generations=4):
    """``values [B, M, K]``, ``applies [B, K]``: of very different sizes; the second reward is equal all over one group."""
    rng = np.random.default_rng(7)
    values = rng.normal(size=(prompts, generations, 3)) * [1.0, 0.002, 30.0] + [0.0, 0.21, 85.0]
    applies = np.ones((prompts, 3), dtype=bool)
    values[1, :, 1] = 0.1
    if "dropped" in case:
        values[0, 2, 0] = values[2, 1, 2] = np.nan
    if "routed" in case:
        applies[0, 1] = applies[2, 0] = applies[1, 2] = False
        values[0, :, 1] = np.nan  # never asked
        values[2, :, 0] = 123.0  # never looked at
    return values, applies


def rewards_of(values, applies, weights=WEIGHTS):
    """``Rewards`` of all samples and their ids, prompt by prompt."""
    prompts, generations, _ = values.shape
    prompt = torch.arange(prompts).repeat_interleave(generations)
    flat = torch.from_numpy(values.reshape(-1, values.shape[2]).copy())
    everywhere = torch.from_numpy(applies).repeat_interleave(generations, dim=0)
    rewards = Rewards(values=flat, applies=everywhere, weights=weights)
    return rewards, prompt, torch.arange(generations).repeat(prompts)


def reference_advantages(values, applies, weights, *, combine, std, ddof=0, eps=1e-4, clip=None):
    """``[B, M]`` float64, 0 where dropped."""
    prompts, generations, count = values.shape
    valid = np.array(
        [[all(not applies[b, k] or np.isfinite(values[b, m, k]) for k in range(count)) for m in range(generations)]
         for b in range(prompts)]
    )  # fmt: skip
    asked = [[k for k in range(count) if applies[b, k]] for b in range(prompts)]
    if combine == "sum":
        sums = np.zeros((prompts, generations, 1))
        for b in range(prompts):
            for k in asked[b]:
                sums[b, :, 0] += weights[k] * values[b, :, k]
        values, weights, asked = sums, (1.0,), [[0]] * prompts

    def spread(sample):
        return np.std(sample, ddof=ddof) if len(sample) > ddof else 0.0

    result = np.zeros((prompts, generations))
    for b in range(prompts):
        for k in asked[b]:
            own = values[b, valid[b], k]
            if len(own) == 0 or own.max() == own.min():
                continue
            everyone = np.concatenate([values[o, valid[o], k] for o in range(prompts) if k in asked[o]])
            divisor = {"group": spread(own) + eps, "global": spread(everyone) + eps, "none": 1.0}[std]
            result[b, valid[b]] += weights[k] * (own - own.mean()) / divisor
    if combine == "gdpo":
        batch = result[valid]
        result = np.where(valid, (result - batch.mean()) / (spread(batch) + eps), 0.0)
    return result if clip is None else np.clip(result, -clip, clip)


class SeveralRewards(Update):
    """An update whose rewards are ``values [B, M, K]`` with a mask."""

    def __init__(self, policy, values, applies, weights=WEIGHTS, **options):
        super().__init__(policy, torch.zeros(values.shape[:2]), **options)
        self.several, self.prompt, self.generation = rewards_of(values, applies, weights)
        self.weights = weights

    def context(self):
        return replace(super().context(), reward_weights=self.weights)

    def rows(self, rows):
        """Positions of these samples in the table."""
        return rows.prompt * self.generations + rows.generation

    def advantages(self, prompts):
        known = torch.isin(self.prompt, torch.tensor(prompts))
        return self.advantage(self.several[known], self.prompt[known], self.generation[known])

    def __call__(self, schedule):
        schedule.bind(self.context())
        for p in self.parameters:
            p.grad = None
        schedule.begin(self.prompts * self.generations * self.window.size(self.num_steps))
        held = []
        for prompt in range(self.prompts):
            for request in self.requests([prompt]):
                held.append(schedule.rollout(request))
                if schedule.wants_rewards_early:
                    schedule.absorb(held[-1], self.advantage.columns(self.several[self.rows(request.rows)]))
            if not self.advantage.needs_iteration:
                schedule.backward(held, self.advantages([prompt]))
                held.clear()
        if held:
            schedule.backward(held, self.advantages(list(range(self.prompts))))
        schedule.finish(self.advantage.final_scale(self.several, self.prompt))
        return [None if p.grad is None else p.grad.clone() for p in self.parameters]

"""The gradient by plain automatic differentiation in float64, without any schedule: what all of them approximate.

    L = sum over prompts b, generations m, trained steps t of  -A_bm w_t / N  log p(x_{t+1} | x_t)

on the recorded transitions of a :class:`~benchmarks.replay.Tape`, with the weights that the low-precision policy has.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from benchmarks.replay import Tape
from benchmarks.update import Update
from lightning_modules.policies.base import Policy


def float64_policy(policy: Policy) -> Policy:
    """A copy with the same weights, widened."""
    return copy.deepcopy(policy).double()


def reference_gradient(update: Update, tape: Tape, rewards: Tensor) -> None:
    """Leave the gradient in the ``.grad`` of ``update.policy``, a float64 policy. ``rewards [B, M]`` float64; no KL."""
    process = update.process
    for p in update.parameters:
        p.grad = None
    for prompt in range(len(update.prompts)):
        group = update.rows(prompt, prompt + 1)
        advantages = update.advantages(rewards, group).of(group.prompt, group.generation)
        trained = update.request(group).trained
        for step in range(update.num_steps):
            rows = group[trained[:, step]]
            if len(rows):
                x, after = (end.double() for end in tape.ends(step, rows))
                conditioning = update.policy.encode([update.prompts[prompt]] * len(rows))
                mean, std = process.moments(step, x, conditioning)
                log_prob = process.transition.log_prob(after, mean, std)
                coefficient = -advantages[trained[:, step]] * update.step_weights[step] / update.normaliser
                (coefficient.to(log_prob) @ log_prob).backward()
    final = update.advantage.final_scale(rewards.flatten())
    for p in update.parameters:
        if p.grad is not None:
            p.grad.mul_(final)
    assert all(p.dtype == torch.float64 for p in update.parameters)

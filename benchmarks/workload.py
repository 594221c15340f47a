"""What a benchmark runs: a policy, a reward, a sampler and a handful of prompts, the same for every schedule."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks.update import Clock, Score, Update
from datamodules.prompts import Prompt, load_prompts
from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.sigmas import Sigmas
from lightning_modules.flow.transitions import Transition
from lightning_modules.flow.windows import Window
from lightning_modules.policies.base import Policy
from lightning_modules.types import Rollout
from rewards.base import Reward


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration's work.

    Args:
        policy: the generator whose gradient is formed.
        reward: scores the finished images.
        transition: the stochastic kernel of the trained steps.
        sigmas: the noise grid.
        advantage: how rewards become advantages.
        prompt_file: a ``.txt`` or ``.jsonl`` file.
        prompts: B, how many of the file's prompts, evenly spaced.
        generations: M, generations of each prompt.
        num_steps: T, denoising steps.
        learning_rate: of AdamW, whose other settings are PyTorch's.
        max_grad_norm: bound on the global gradient norm, or null.
        seed: key of all noise, and of a random initialisation.
    """

    policy: Policy
    reward: Reward
    transition: Transition
    sigmas: Sigmas
    advantage: GroupAdvantage
    prompt_file: str = "datamodules/shapes_prompts/train_metadata.jsonl"
    prompts: int = 2
    generations: int = 8
    num_steps: int = 10
    learning_rate: float = 3e-5
    max_grad_norm: float | None = 1.0
    seed: int = 0

    @cached_property
    def chosen_prompts(self) -> list[Prompt]:
        """[B] prompts. Errors: ``ValueError`` if the file holds fewer."""
        every = load_prompts(self.prompt_file)
        if not 1 <= self.prompts <= len(every):
            raise ValueError(f"prompts={self.prompts}: expected 1 to {len(every)}, the prompts in {self.prompt_file}")
        return [every[k * len(every) // self.prompts] for k in range(self.prompts)]

    def update(self, policy: Policy, window: Window, micro_batch: int, groups_in_flight: int = 1) -> Update:
        """This work for ``policy``: the workload's own, or a copy of it in another precision."""
        return Update(
            policy,
            prompts=[prompt.text for prompt in self.chosen_prompts],
            generations=self.generations,
            transition=self.transition,
            sigmas=self.sigmas,
            num_steps=self.num_steps,
            window=window,
            advantage=self.advantage,
            micro_batch=micro_batch,
            groups_in_flight=groups_in_flight,
            seed=self.seed,
        )

    def score(self, clock: Clock) -> Score:
        """Decode and score, with the phases ``decode`` and ``reward``."""
        prompts = self.chosen_prompts

        @torch.no_grad()
        def score(rollout: Rollout) -> Tensor:
            mine = [prompts[p] for p in rollout.request.rows.prompt.tolist()]
            with clock("decode"):
                images = self.policy.decode(rollout.latents)
            with clock("reward"):
                return self.reward(images, [p.text for p in mine], [p.metadata for p in mine])

        return score

    def optimizer(self, policy: Policy) -> AdamW:
        return AdamW([p for p in policy.parameters() if p.requires_grad], lr=self.learning_rate)

    def clip(self, policy: Policy) -> None:
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for p in policy.parameters() if p.requires_grad], self.max_grad_norm)


SHAPES: dict[str, Any] = {
    "workload.policy": {"class_path": "lightning_modules.policies.shapes.ShapesPolicy"},
    "workload.transition": {
        "class_path": "lightning_modules.flow.transitions.FlowSDE",
        "init_args": {"noise_level": 0.7},
    },
    "workload.sigmas": {"class_path": "lightning_modules.flow.sigmas.LinearSigmas", "init_args": {"shift": 3.0}},
    "workload.advantage": {"class_path": "lightning_modules.advantages.GroupAdvantage"},
}
"""Default workload: the embedded model as the quickstart trains it."""

SMALL_SHAPES: dict[str, Any] = {
    "workload.policy": {
        "class_path": "lightning_modules.policies.shapes.ShapesPolicy",
        "init_args": {"weights": None, "num_layers": 1, "width": 32, "num_heads": 2, "patch_size": 8},
    },
    "workload.generations": 3,
    "workload.num_steps": 5,
}
"""What ``--quick`` changes: an untrained model of one small block, fewer samples and steps."""

"""A whole run in miniature: a tiny policy, six prompts, and rewards that do as they are told."""

import torch

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.sigmas import LinearSigmas
from lightning_modules.flow.transitions import FlowSDE
from lightning_modules.flow.windows import AllButLast
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.schedules.retain import Retain
from lightning_modules.types import Rows, Samples
from rewards.base import Reward
from tests.tiny import TinyPolicy

TAGS = ("colors", "colors", "counting", "counting", "position", "position")
PROMPTS = [{"prompt": f"prompt number {i}" + "!" * i, "tag": tag} for i, tag in enumerate(TAGS)]


class ByPrompt(Reward):
    """The score is looked up by prompt; an exception is raised, a callable is called."""

    def __init__(self, scores, default=0.0):
        self.scores, self.default, self.calls = scores, default, []

    def score(self, images, prompts, metadata):
        self.calls.append(tuple(prompts))
        values = [self.scores.get(prompt, self.default) for prompt in prompts]
        for value in values:
            if isinstance(value, BaseException):
                raise value
        return torch.tensor(values, dtype=torch.float64)


class MeanPixel(Reward):
    def score(self, images, prompts, metadata):
        return images.double().flatten(1).mean(1)


def make_samples(prompts, metadata=None, images=None, size=4):
    rows = Rows(prompt=torch.arange(len(prompts)), generation=torch.zeros(len(prompts), dtype=torch.int64))
    return Samples(
        images=torch.rand(len(prompts), 3, size, size) if images is None else images,
        prompts=tuple(prompts),
        metadata=tuple(metadata or [{} for _ in prompts]),
        rows=rows,
    )


def make_module(**changes):
    parts = {
        "policy": TinyPolicy(), "schedule": Retain(), "transition": FlowSDE(0.7), "sigmas": LinearSigmas(3.0),
        "window": AllButLast(), "advantage": GroupAdvantage(), "num_steps": 3, "generations_per_prompt": 2,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    }  # fmt: skip
    return LeanGRPO(**(parts | changes))

"""One training run of LeanGRPO as a plain function of a case, so that it can run in this process or on several."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.parallel.tensors import whole
from lightning_modules.policies.shapes import ShapesPolicy
from lightning_modules.schedules.base import Schedule
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.schedules.reweight_sharded import ReweightSharded
from lightning_modules.strategies import FSDP2Strategy
from tests import tiny_models
from tests.loop import fit, module

SCHEDULES: dict[str, Any] = {
    "native": Native,
    "retain": Retain,
    "per_sample": lambda: Reweight("per_sample"),
    "streaming": lambda: Reweight("streaming"),
    "sharded": ReweightSharded,
}
STRATEGIES: dict[str, Any] = {
    "single": lambda: "auto",
    "ddp": DDPStrategy,
    "fsdp2": FSDP2Strategy,
    "hybrid": lambda: FSDP2Strategy(replicate=2),
    "fsdp2_bf16": lambda: FSDP2Strategy(param_dtype="bfloat16"),
}
TEXTS = ("a red circle", "two blue squares", "a green ring")


@dataclass(frozen=True, kw_only=True)
class Case:
    """What distinguishes a run."""

    schedule: str = "retain"
    strategy: str = "single"
    ranks: int = 1
    policy: str = "full"
    """``full`` and ``lora``: a tiny policy of ``family``; ``shapes``: the embedded model, small."""
    family: str = "sd3"
    prompts: int = 2
    generations: int = 4
    rewards: tuple[tuple[float, ...], ...] | None = None
    """[B][M]; by default numbers that differ everywhere."""
    iterations: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    """of LeanGRPO."""
    policy_options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)

    @property
    def table(self) -> Tensor:
        """[B, M] float64."""
        if self.rewards is not None:
            return torch.tensor(self.rewards, dtype=torch.float64)
        count = self.prompts * self.generations
        return torch.sin(torch.arange(count, dtype=torch.float64) * 1.7).reshape(self.prompts, self.generations)

    def on(self, strategy: str, ranks: int) -> Case:
        return replace(self, strategy=strategy, ranks=ranks)


class GivenRewards(Callback):
    """Scores by the samples' ids."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.scored = table, []

    def on_rollout_end(self, trainer, pl_module, samples, scores):
        rows = samples.rows
        self.scored += list(zip(rows.prompt.tolist(), rows.generation.tolist(), strict=True))
        scores.values["reward"] = self.table[rows.prompt, rows.generation]


class Capture(Callback):
    """The gradient that the optimizer is given, whole and flat, of every update."""

    def __init__(self) -> None:
        self.gradients: list[Tensor] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        parameters = [p for p in pl_module.policy.parameters() if p.requires_grad]
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        self.gradients.append(torch.cat([whole(part.detach()).flatten() for part in parts]).clone())


def make_policy(case: Case):
    if case.policy == "shapes":
        torch.manual_seed(5)
        policy = ShapesPolicy(weights=None, num_layers=2, width=16, num_heads=2)
    else:
        policy = tiny_models.policy(case.family, trainable=case.policy, **case.policy_options)
    tiny_models.move(policy)  # adapters no longer add zero
    return policy


def make_module(case: Case):
    schedule: Schedule = SCHEDULES[case.schedule]()
    defaults: dict[str, Any] = {
        "advantage": GroupAdvantage(clip=None),
        "max_grad_norm": None,
        "num_steps": 3,
        "lr": 1e-3,
    }
    options = defaults | {"generations_per_prompt": case.generations, "rank_timeout": 30.0} | case.options
    return module(schedule, policy=make_policy(case), **options)


def run(case: Case, *callbacks: Callback) -> dict[str, Any]:
    """Train as ``case`` says -> what this rank saw: ``gradients``, ``weights`` (whole), ``metrics``, ``scored`` and, of the
    gradients' reduction, ``traffic``."""
    model, scorer, capture = make_module(case), GivenRewards(case.table), Capture()
    with tempfile.TemporaryDirectory() as root, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        metrics = fit(
            model, case.iterations, root=root, scorer=scorer, callbacks=[capture, *callbacks], prompts=TEXTS[: case.prompts],
            strategy=STRATEGIES[case.strategy](), devices=case.ranks, use_distributed_sampler=False, **case.trainer,
        )  # fmt: skip
    weights = {n: whole(p.detach()).cpu().clone() for n, p in model.policy.named_parameters() if p.requires_grad}
    traffic = model.schedule.context.gradients.traffic
    return {
        "gradients": capture.gradients,
        "weights": torch.cat([w.flatten() for w in weights.values()]),
        "metrics": metrics,
        "scored": scorer.scored,
        "traffic": (traffic.reductions, traffic.collectives, traffic.bytes),
        "forward_rows": metrics[-1]["rows/forward"] if metrics else 0,
    }

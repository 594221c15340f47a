"""How closely the schedules' updates agree: LeanGRPO's (arXiv 2609.03528) Tables 2-4 on any policy, by default the embedded
one, and each schedule's own distance from a float64 reference.

    python -m benchmarks.alignment [--config FILE] [--quick] [--output DIR]

Compared, over all trainable parameters: the ``gradient`` before clipping, the parameter ``update`` of one AdamW step, and
AdamW's moments ``exp_avg`` and ``exp_avg_sq``. The comparison is made on two kinds of trajectory.

``fixed``: every schedule scores the transitions that Native sampled, with the same rewards. The float64 reference does
too, with the same weights widened, so its distance is the error that rounding makes in each schedule. As a yardstick
Native is also run one row at a time: nothing but the batch size of its policy calls differs.

``end to end``: every schedule samples, scores and trains by itself from the same weights and noise, over several
iterations. Reweight calls the policy row by row on trained steps, which in low precision rounds differently from a
batch, so its samples drift; the row ``latents`` says how far.

Precisions: ``fp32``; ``bf16`` (weights, compute and optimizer state); ``bf16-mixed`` (fp32 weights and optimizer state,
bf16 autocast). Stored latents, transitions and log-probabilities are fp32 in all of them. In ``bf16`` a step of usual
size is lost in the rounding of most weights, whatever the schedule: its ``update`` is far from the float64 one's.
AdamW's first step is nearly the sign of the gradient, so elements near zero turn a tiny difference into a whole step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from benchmarks.alignment_figure import draw
from benchmarks.cli import parse
from benchmarks.metrics import Distance, distance, flatten
from benchmarks.reference import float64_policy, reference_gradient
from benchmarks.replay import ReplayedNative, ReplayedRetain, ReplayedReweight, Tape
from benchmarks.report import environment_line, table, write_json
from benchmarks.update import Finished, Score, untimed
from benchmarks.workload import SHAPES, SMALL_SHAPES, Workload
from lightning_modules.flow.windows import AllButLast
from lightning_modules.policies.base import Policy
from lightning_modules.schedules.base import Schedule
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.types import Rollout

Precision = Literal["fp32", "bf16", "bf16-mixed"]
Vectors = dict[str, Tensor]
"""Name of a quantity -> float64 ``[n]``."""

QUANTITIES = ("gradient", "update", "exp_avg", "exp_avg_sq")
ONE_ROW = "Native, one row at a time"
_SCHEDULES: dict[str, tuple[Callable[[], Schedule], Callable[[Tape], Schedule]]] = {
    "Native": (Native, lambda tape: ReplayedNative().on(tape)),
    ONE_ROW: (Native, lambda tape: ReplayedNative().on(tape)),
    "Retain": (Retain, lambda tape: ReplayedRetain().on(tape)),
    "Reweight, per sample": (
        lambda: Reweight("per_sample"),
        lambda tape: ReplayedReweight("per_sample").on(tape),
    ),
    "Reweight, streaming": (
        lambda: Reweight("streaming"),
        lambda tape: ReplayedReweight("streaming").on(tape),
    ),
}
"""Name -> the schedule by itself, and on a recorded trajectory. The first is what the others are compared with."""

# A smooth reward: no two images tie, and rounding carries none across a threshold.
DEFAULTS = SHAPES | {"workload.reward": {"class_path": "rewards.brightness.Brightness"}, "workload.generations": 4}
QUICK = SMALL_SHAPES | {"micro_batch": 3, "iterations": 2}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the result."""

    precision: Precision
    trajectory: Literal["fixed", "end to end"]
    iteration: int
    """1-based."""
    schedule: str
    quantity: str
    """one of QUANTITIES, or "latents"."""
    native: Distance
    """distance from Native."""
    float64: Distance | None
    """distance from the float64 reference; fixed trajectory only."""


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """How closely the schedules' updates agree with Native's, and with a float64 reference.

    Args:
        workload: what is run.
        precisions: any of fp32, bf16, bf16-mixed.
        micro_batch: rows per policy call.
        iterations: end-to-end updates.
    """

    workload: Workload
    precisions: list[Precision] = field(default_factory=lambda: ["fp32", "bf16", "bf16-mixed"])
    micro_batch: int = 4
    iterations: int = 2

    def run(self) -> list[Row]:
        rows = []
        for precision in self.precisions:
            rows += [*self._fixed(precision), *self._end_to_end(precision)]
        return rows

    def _fixed(self, precision: Precision) -> list[Row]:
        policy = cast(self.workload.policy, precision)
        sampled = self._update(policy, Native(), self.workload.score(untimed), precision)
        tape, rewards = Tape.record(sampled.rollouts), sampled.rewards
        truth = self._truth(policy, tape, rewards)
        native: Vectors = {}
        rows = []
        for name, (_, replayed) in _SCHEDULES.items():
            mine = copy.deepcopy(policy)
            self._update(mine, replayed(tape), given(rewards), precision, name)
            vectors = take_step(mine, self.workload.optimizer(mine), self.workload.clip)
            native = native or vectors
            rows += [
                Row(
                    precision=precision,
                    trajectory="fixed",
                    iteration=1,
                    schedule=name,
                    quantity=quantity,
                    native=distance(native[quantity], vectors[quantity]),
                    float64=distance(truth[quantity], vectors[quantity]),
                )
                for quantity in QUANTITIES
            ]
        return rows

    def _truth(self, policy: Policy, tape: Tape, rewards: Tensor) -> Vectors:
        exact = float64_policy(policy)
        reference_gradient(self.workload.update(exact, AllButLast(), self.micro_batch), tape, rewards)
        return take_step(exact, self.workload.optimizer(exact), self.workload.clip)

    def _end_to_end(self, precision: Precision) -> list[Row]:
        policies = {name: cast(self.workload.policy, precision) for name in _SCHEDULES}
        optimizers = {name: self.workload.optimizer(policy) for name, policy in policies.items()}
        rows = []
        for iteration in range(self.iterations):
            native: Vectors = {}
            for name, (schedule, _) in _SCHEDULES.items():
                score = self.workload.score(untimed)
                finished = self._update(policies[name], schedule(), score, precision, name, iteration)
                vectors = take_step(policies[name], optimizers[name], self.workload.clip)
                vectors["latents"] = flatten([finished.latents])
                native = native or vectors
                rows += [
                    Row(
                        precision=precision,
                        trajectory="end to end",
                        iteration=iteration + 1,
                        schedule=name,
                        quantity=quantity,
                        native=distance(native[quantity], vectors[quantity]),
                        float64=None,
                    )
                    for quantity in (*QUANTITIES, "latents")
                ]
        return rows

    def _update(
        self, policy: Policy, schedule: Schedule, score: Score, precision: Precision, name: str = "", iteration: int = 0
    ) -> Finished:
        update = self.workload.update(policy, AllButLast(), 1 if name == ONE_ROW else self.micro_batch)
        with computing(precision, policy.device):
            return update(schedule, score, iteration=iteration)


def cast(policy: Policy, precision: Precision) -> Policy:
    """A copy with the precision's weights."""
    return copy.deepcopy(policy).to(torch.bfloat16 if precision == "bf16" else torch.float32)


def computing(precision: Precision, device: torch.device) -> AbstractContextManager:
    return torch.autocast(device.type, torch.bfloat16) if precision == "bf16-mixed" else nullcontext()


def given(rewards: Tensor) -> Score:
    """The rewards ``[B, M]`` looked up by id."""

    def score(rollout: Rollout) -> Tensor:
        return rewards[rollout.request.rows.prompt, rollout.request.rows.generation]

    return score


def take_step(policy: Policy, optimizer: Optimizer, clip: Callable[[Policy], None]) -> Vectors:
    """Clip and step -> the gradient before clipping, what the step changed, and the optimizer's moments."""
    parameters = [p for p in policy.parameters() if p.requires_grad]
    gradient = flatten(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters)
    before = flatten(parameters)
    clip(policy)
    optimizer.step()
    optimizer.zero_grad()
    moments = {
        name: flatten(optimizer.state[p].get(name, torch.zeros_like(p)) for p in parameters)
        for name in ("exp_avg", "exp_avg_sq")
    }
    return {"gradient": gradient, "update": flatten(parameters) - before, **moments}


def tables(rows: Sequence[Row]) -> str:
    """The rows as text: fixed trajectories, the first end-to-end iteration, and how the gradient drifts after it."""
    parts = []
    for precision in dict.fromkeys(row.precision for row in rows):
        mine = [row for row in rows if row.precision == precision]
        fixed = [row for row in mine if row.trajectory == "fixed"]
        first = [row for row in mine if row.trajectory == "end to end" and row.iteration == 1]
        parts += [
            f"\n{precision}, fixed trajectory",
            _table(fixed),
            f"\n{precision}, end to end, iteration 1",
            _table(first),
        ]
        if max(row.iteration for row in mine) > 1:
            parts += [f"\n{precision}, end to end, relative L2 to Native by iteration", _drift(mine)]
    return "\n".join(parts)


def _table(rows: Sequence[Row]) -> str:
    truth = any(row.float64 for row in rows)
    header = [
        "schedule",
        "quantity",
        "cosine",
        "relative L2",
        "max abs",
        *(["relative L2 to float64"] if truth else []),
    ]
    rows = [row for row in rows if truth or row.schedule != "Native"]
    cells = [
        [
            row.schedule,
            row.quantity,
            f"{row.native.cosine:.8f}",
            _number(row.native.relative_l2),
            _number(row.native.max_abs),
            *([_number(row.float64.relative_l2)] if row.float64 else []),
        ]
        for row in rows
    ]
    return table(header, cells)


def _drift(rows: Sequence[Row]) -> str:
    values: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.trajectory == "end to end" and row.quantity in ("gradient", "latents") and row.schedule != "Native":
            values.setdefault((row.schedule, row.quantity), []).append(_number(row.native.relative_l2))
    iterations = len(next(iter(values.values())))
    header = ["schedule", "quantity", *(f"iteration {k + 1}" for k in range(iterations))]
    return table(header, [[*key, *numbers] for key, numbers in values.items()])


def _number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3e}"


def main(args: Sequence[str] | None = None) -> list[Row]:
    """Run from the command line, print the tables, write ``alignment.json`` and ``alignment.png``."""
    asked = parse(Alignment, name="alignment", defaults=DEFAULTS, quick=QUICK, args=args)
    rows = asked.benchmark.run()
    print(f"$ {asked.command}\n{environment_line()}\n{tables(rows)}")
    results = {"rows": [asdict(row) for row in rows]}
    write_json(
        asked.output / "alignment.json",
        benchmark="alignment", command=asked.command, settings=asked.settings, results=results,
    )  # fmt: skip
    draw(results["rows"], asked.output / "alignment.png")
    print(f"\nwritten: {asked.output / 'alignment.json'}, {asked.output / 'alignment.png'}")
    return rows


if __name__ == "__main__":
    main()

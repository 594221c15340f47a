"""One update of FLUX.1-dev (LoRA) and SD3.5-Medium (LoRA) at their real sizes with random weights, under each schedule: step
time and peak memory on one card, beside the memory that the plan foretells.

    python -m benchmarks.real_models [--quick] [--models flux_dev sd35_medium] [--repetitions 2] [--output DIR]

FLUX.1-dev as in LeanGRPO's (arXiv 2609.03528) setting: bf16, 512 x 512, LoRA r64, activation checkpointing, 6 steps of which 5
are trained, 8 generations; SD3.5-Medium as FlowGRPO trains it without guidance: 10 steps of which 9 are trained. One group
is rolled out, decoded by a VAE of the released size, scored and trained on. Schedules take turns, after a warm-up each.

It needs one CUDA card of 80 GB, and is sized for 8 minutes on a recent one (an estimate: no such run is on record yet).
Without one, or with ``--quick``, it runs the same script on small architectures on the CPU, which says that it works and
nothing about time or memory.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from benchmarks.random_weights import untrained
from benchmarks.report import environment_line, table, write_json
from benchmarks.timing import PhaseClock, Spread
from benchmarks.update import Update
from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.sigmas import DynamicShiftSigmas, EulerSigmas, Sigmas
from lightning_modules.flow.transitions import FlowSDE
from lightning_modules.flow.windows import AllButLast
from lightning_modules.plan.plan import Plan, plan, readable
from lightning_modules.policies.diffusers_base import DiffusersPolicy
from lightning_modules.schedules.base import Schedule
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.types import Rollout
from rewards.brightness import Brightness

SCHEDULES: dict[str, type[Schedule]] = {"Native": Native, "Retain": Retain, "Reweight": Reweight}
PHASES = ("rollout", "backward", "update", "decode", "reward", "optimizer")
LEARNING_RATE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is run for a model."""

    model: str
    """file in ``configs/model``."""
    sigmas: Sigmas
    noise_level: float
    num_steps: int
    micro_batch: int
    options: dict[str, Any]
    """of the policy."""
    generations: int = 8
    device: str = "cuda"
    dtype: str = "bfloat16"
    smaller: dict[str, Any] | None = None
    """changes to the released architecture, and below to its VAE's."""
    smaller_vae: dict[str, Any] | None = None

    def policy(self) -> DiffusersPolicy:
        made = untrained(
            self.model,
            dtype=self.dtype,
            device=self.device,
            smaller=self.smaller,
            smaller_vae=self.smaller_vae,
            options=self.options,
        )
        return made.eval()

    def update(self, policy: DiffusersPolicy) -> Update:
        return Update(
            policy,
            prompts=["a prompt"],
            generations=self.generations,
            transition=FlowSDE(self.noise_level),
            sigmas=self.sigmas,
            num_steps=self.num_steps,
            window=AllButLast(stochastic="all"),
            advantage=GroupAdvantage(),
            micro_batch=self.micro_batch,
        )


FULL = {
    case.model: case
    for case in (
        Case(
            model="flux_dev",
            sigmas=DynamicShiftSigmas(),
            noise_level=0.9,
            num_steps=6,
            micro_batch=4,
            options={"height": 512, "width": 512, "activation_checkpointing": True, "decode_batch": 4},
        ),
        Case(
            model="sd35_medium",
            sigmas=EulerSigmas(3.0),
            noise_level=0.7,
            num_steps=10,
            micro_batch=8,
            options={"height": 512, "width": 512, "activation_checkpointing": True, "decode_batch": 4},
        ),
    )
}
_BLOCK = {
    "num_layers": 1,
    "num_attention_heads": 2,
    "attention_head_dim": 8,
    "joint_attention_dim": 8,
    "pooled_projection_dim": 8,
}
_SMALLER = {
    "flux_dev": _BLOCK | {"num_single_layers": 1, "axes_dims_rope": [2, 2, 4]},
    "sd35_medium": _BLOCK
    | {"num_layers": 2, "caption_projection_dim": 16, "dual_attention_layers": [0], "pos_embed_max_size": 8},
}
_SMALLER_VAE = {"block_out_channels": [4, 4, 4, 4], "norm_num_groups": 2, "layers_per_block": 1}
QUICK = {
    name: replace(
        case, num_steps=3, generations=2, micro_batch=2, device="cpu", dtype="float32",
        smaller=_SMALLER[name], smaller_vae=_SMALLER_VAE,
        options=case.options | {"height": 32, "width": 32, "max_sequence_length": 4},
    )
    for name, case in FULL.items()
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    model: str
    schedule: str
    seconds: Spread
    """of one update of one group, optimizer step included."""
    phases: dict[str, float]
    """medians; ``update`` is Native's recomputation, or the lean schedules' correction."""
    speedup: float
    """over Native: ratio of the medians."""
    peak_bytes: int | None
    """allocated on the card at the worst moment, ``None`` on the CPU."""
    planned_bytes: int
    forward_rows: int
    backward_rows: int
    parameters: int
    trainable: int


def run(case: Case, repetitions: int) -> list[Result]:
    """Every schedule's median of ``repetitions`` updates, taken in turns after a warm-up."""
    policy = case.policy()
    update, device = case.update(policy), torch.device(case.device)
    optimizer = AdamW(update.parameters, lr=LEARNING_RATE)
    schedules = {name: make() for name, make in SCHEDULES.items()}
    taken: dict[str, list[PhaseClock]] = {name: [] for name in schedules}
    totals: dict[str, list[float]] = {name: [] for name in schedules}
    peaks: dict[str, int] = dict.fromkeys(schedules, 0)
    for repetition in range(repetitions + 1):
        for name, schedule in schedules.items():
            clock, seconds, peak = _once(update, schedule, optimizer, policy, device)
            print(f"{case.model} {name}: {seconds:.2f} s" + (" (warm-up)" if repetition == 0 else ""), flush=True)
            if repetition:
                taken[name].append(clock)
                totals[name].append(seconds)
                peaks[name] = max(peaks[name], peak)
    plans = {name: _plan(case, update, schedule) for name, schedule in schedules.items()}
    native = Spread.of(totals["Native"]).median
    return [
        Result(
            model=case.model,
            schedule=name,
            seconds=Spread.of(totals[name]),
            phases={p: Spread.of([clock.seconds.get(p, 0.0) for clock in taken[name]]).median for p in PHASES},
            speedup=native / Spread.of(totals[name]).median,
            peak_bytes=peaks[name] or None,
            planned_bytes=plans[name].total_bytes + plans[name].frozen_bytes,
            forward_rows=schedule.forward_rows,
            backward_rows=schedule.backward_rows,
            parameters=plans[name].parameters,
            trainable=plans[name].trainable,
        )
        for name, schedule in schedules.items()
    ]


def _once(
    update: Update, schedule: Schedule, optimizer: AdamW, policy: DiffusersPolicy, device: torch.device
) -> tuple[PhaseClock, float, int]:
    """One update with its optimizer step -> its phases, its seconds, the peak of allocated bytes (0 on the CPU)."""
    clock, reward = PhaseClock(device), Brightness()

    @torch.no_grad()
    def score(rollout: Rollout) -> Tensor:
        with clock("decode"):
            images = policy.decode(rollout.latents)
        with clock("reward"):
            return reward(images, ["a prompt"] * len(images), [{}] * len(images))

    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    update(schedule, score, clock=clock)
    with clock("optimizer"):
        torch.nn.utils.clip_grad_norm_(update.parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    return clock, seconds, torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


def _plan(case: Case, update: Update, schedule: Schedule) -> Plan:
    return plan(
        policy=update.policy,
        schedule=schedule,
        process=update.process,
        window=update.window,
        advantage=update.advantage,
        optimizer=partial(AdamW, lr=LEARNING_RATE),
        conditioning=update.policy.encode(update.prompts),
        prompts=len(update.prompts),
        generations=case.generations,
        micro_batch=case.micro_batch,
    )


def report(results: Sequence[Result]) -> str:
    rows = [
        [
            r.model,
            r.schedule,
            f"{r.seconds.median:.2f}",
            f"{r.speedup:.2f}x",
            "not measured" if r.peak_bytes is None else readable(r.peak_bytes),
            readable(r.planned_bytes),
            f"{r.forward_rows} / {r.backward_rows}",
            " ".join(f"{phase} {seconds:.2f}" for phase, seconds in r.phases.items()),
        ]
        for r in results
    ]
    return table(
        ["model", "schedule", "seconds", "speed-up", "peak memory", "planned", "rows fwd / bwd", "phases, s"], rows
    )


def main(args: Sequence[str] | None = None) -> list[Result]:
    given = list(sys.argv[1:] if args is None else args)
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.real_models",
        description="Step time and peak memory of the real backbones on one card.",
    )
    parser.add_argument("--quick", action="store_true", help="small architectures on the CPU")
    parser.add_argument("--models", nargs="+", choices=list(FULL), default=list(FULL))
    parser.add_argument("--repetitions", type=int, default=2, help="timed updates per schedule (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for the results")
    options = parser.parse_args(given)
    if options.repetitions < 1:
        raise ValueError(f"repetitions={options.repetitions}: give at least 1")
    small = options.quick or not torch.cuda.is_available()
    if small and not options.quick:
        print(
            "no CUDA device here: running the small preset on the CPU instead. Missing from the results: step time and peak "
            "memory at real size, which need one card of 80 GB"
        )
    results = []
    for name in options.models:
        results += run((QUICK if small else FULL)[name], options.repetitions)
        gc.collect()
    print(f"\n{report(results)}\n\n{environment_line()}")
    preset = "small" if small else "full"
    write_json(
        options.output / f"real_models_{preset}.json",
        benchmark="real_models",
        command=shlex.join(["python", "-m", "benchmarks.real_models", *given]),
        settings={"preset": preset, "repetitions": options.repetitions, "models": options.models},
        results={"updates": [asdict(result) for result in results]},
    )
    return results


if __name__ == "__main__":
    main()

"""How long one update takes under each schedule: LeanGRPO's (arXiv 2609.03528) Figures 3 and 4 on any policy, by default the
embedded one, beside the bound on what leaving out the recomputation can gain (:mod:`benchmarks.timing`).

    python -m benchmarks.step_time [--config FILE] [--quick] [--output DIR]

Timestep fraction ``f``: ``|S| = int(f (T - 1))`` of the steps are trained, drawn at random. One run measures everything:
after a warm-up, each round times every case once, in an order of its own, and the no-gradient forward of the bound with
them, so that a slow spell of the machine falls on all. Medians over the rounds, and quartiles; a speed-up is the ratio
of two medians, its quartiles those of the rounds' own ratios.

Every schedule is timed at the same micro-batch, and at its own best of ``micro_batches`` (least median at f = 1.0, from
rounds of its own). Reweight runs trained steps row by row whatever the micro-batch. A model so small that one row does
not fill the machine is therefore slower under Reweight than under Native; at the sizes the paper measures, one row fills
the card.

Phases: ``rollout`` forwards of the rollout, ``backward``, ``update`` Native's recomputation, or the lean schedules'
correction, ``decode``, ``reward``, ``optimizer`` clipping and AdamW.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from benchmarks.cli import parse
from benchmarks.report import environment, environment_line, table, write_json
from benchmarks.step_time_figure import draw
from benchmarks.timing import PhaseClock, Spread, bound
from benchmarks.workload import SHAPES, SMALL_SHAPES, Workload
from lightning_modules.flow.windows import Fraction
from lightning_modules.schedules.base import Schedule
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight

SCHEDULES: dict[str, type[Schedule]] = {"Native": Native, "Retain": Retain, "Reweight": Reweight}
PHASES = ("rollout", "backward", "update", "decode", "reward", "optimizer")

DEFAULTS = SHAPES | {"workload.reward": {"class_path": "rewards.shapes.ShapesReward"}}
QUICK = SMALL_SHAPES | {
    "workload.reward": {"class_path": "rewards.brightness.Brightness"},
    "fractions": [0.5, 1.0],
    "micro_batch": 3,
    "micro_batches": [3, 6],
    "repetitions": 2,
    "search_repetitions": 1,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is timed once a round."""

    schedule: str
    fraction: float
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One timed iteration."""

    seconds: float
    phases: dict[str, float]
    """seconds by phase; with what lies between them they add up to ``seconds``."""
    forward_rows: int
    backward_rows: int


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    fraction: float
    trained_steps: int
    schedule: str
    micro_batch: int
    seconds: Spread
    rounds: list[float]
    """the seconds of every round."""
    speedup: Spread
    """over Native at the same fraction: ratio of the medians, quartiles of the rounds' ratios."""
    bound: float
    """most that leaving out the recomputation could gain over that Native."""
    forward_seconds: Spread
    """F: one no-gradient forward of all rows, in that Native's micro-batches."""
    phases: dict[str, float]
    """medians."""
    forward_rows: int
    backward_rows: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All that was measured."""

    same: list[Result]
    """every schedule at the same micro-batch."""
    best: list[Result]
    """every schedule at its own best."""
    best_micro_batch: dict[str, int]
    search: dict[str, dict[int, float]]
    """schedule -> micro-batch -> median seconds at f = 1.0."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """How long one update takes under each schedule.

    Args:
        workload: what is run; its groups are all in flight at once.
        fractions: timestep fractions, in (0, 1].
        micro_batch: the one that is the same for all schedules.
        micro_batches: among which each schedule's best is looked for.
        repetitions: rounds, after one warm-up round.
        search_repetitions: rounds that look for the best micro-batch, after one warm-up round.
        threads: of PyTorch on the CPU; null leaves its choice.
    """

    workload: Workload
    fractions: list[float] = field(default_factory=lambda: [0.25, 0.5, 0.75, 1.0])
    micro_batch: int = 8
    micro_batches: list[int] = field(default_factory=lambda: [4, 8, 16])
    repetitions: int = 5
    search_repetitions: int = 2
    threads: int | None = None

    def run(self) -> Comparison:
        if self.threads is not None:
            torch.set_num_threads(self.threads)
        bench = _Bench(self.workload)
        search, best = self._search(bench)
        cases = dict.fromkeys(
            Case(schedule=name, fraction=f, micro_batch=size)
            for f in self.fractions
            for name in SCHEDULES
            for size in (self.micro_batch, best[name])
        )
        samples, forwards = bench.measure(list(cases), {self.micro_batch, best["Native"]}, self.repetitions)

        def results(sizes: dict[str, int]) -> list[Result]:
            return [
                self._result(name, f, sizes, samples, forwards[sizes["Native"]])
                for f in self.fractions
                for name in SCHEDULES
            ]

        same = results(dict.fromkeys(SCHEDULES, self.micro_batch))
        return Comparison(same=same, best=results(best), best_micro_batch=best, search=search)

    def _search(self, bench: _Bench) -> tuple[dict[str, dict[int, float]], dict[str, int]]:
        """Median seconds by schedule and micro-batch at f = 1.0, and each schedule's best micro-batch."""
        cases = [
            Case(schedule=name, fraction=1.0, micro_batch=size) for name in SCHEDULES for size in self.micro_batches
        ]
        samples, _ = bench.measure(cases, set(), self.search_repetitions)
        medians: dict[str, dict[int, float]] = {name: {} for name in SCHEDULES}
        for case, taken in samples.items():
            medians[case.schedule][case.micro_batch] = Spread.of([s.seconds for s in taken]).median
        return medians, {name: min(by_size, key=lambda size: by_size[size]) for name, by_size in medians.items()}

    def _result(
        self,
        name: str,
        fraction: float,
        sizes: dict[str, int],
        samples: dict[Case, list[Sample]],
        forwards: list[float],
    ) -> Result:
        taken = samples[Case(schedule=name, fraction=fraction, micro_batch=sizes[name])]
        native = samples[Case(schedule="Native", fraction=fraction, micro_batch=sizes["Native"])]
        seconds, native_seconds = (Spread.of([s.seconds for s in some]) for some in (taken, native))
        ratios = Spread.of([n.seconds / t.seconds for n, t in zip(native, taken, strict=True)])
        forward = Spread.of(forwards)
        trained_steps = Fraction(fraction).size(self.workload.num_steps)
        return Result(
            fraction=fraction,
            trained_steps=trained_steps,
            schedule=name,
            micro_batch=sizes[name],
            seconds=seconds,
            rounds=[s.seconds for s in taken],
            speedup=replace(ratios, median=native_seconds.median / seconds.median),
            bound=bound(native_seconds.median, trained_steps, forward.median),
            forward_seconds=forward,
            phases={phase: Spread.of([s.phases.get(phase, 0.0) for s in taken]).median for phase in PHASES},
            forward_rows=taken[0].forward_rows,
            backward_rows=taken[0].backward_rows,
        )


class _Bench:
    """Times cases on one policy with one optimizer; the weights move a little, the work does not change."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._optimizer = workload.optimizer(workload.policy)

    def measure(
        self, cases: Sequence[Case], forward_sizes: set[int], repetitions: int
    ) -> tuple[dict[Case, list[Sample]], dict[int, list[float]]]:
        """``repetitions`` rounds after a warm-up -> samples by case, and F in seconds by micro-batch."""
        samples: dict[Case, list[Sample]] = {case: [] for case in cases}
        forwards: dict[int, list[float]] = {size: [] for size in sorted(forward_sizes)}
        for round_number in range(1 + repetitions):
            order: list[Case | int] = [*cases, *forwards]
            random.Random(round_number).shuffle(order)
            gc.collect()
            for item in order:
                if isinstance(item, int):
                    forwards[item].append(self._time_forward(item))
                else:
                    samples[item].append(self._time_update(item, round_number))
        return {c: taken[1:] for c, taken in samples.items()}, {size: taken[1:] for size, taken in forwards.items()}

    def _time_update(self, case: Case, iteration: int) -> Sample:
        work, policy = self._workload, self._workload.policy
        clock = PhaseClock(policy.device)
        update = work.update(policy, Fraction(case.fraction), case.micro_batch, groups_in_flight=work.prompts)
        schedule, score = SCHEDULES[case.schedule](), work.score(clock)
        start = time.perf_counter()
        update(schedule, score, iteration=iteration, clock=clock)
        with clock("optimizer"):
            work.clip(policy)
            self._optimizer.step()
            self._optimizer.zero_grad()
        seconds = time.perf_counter() - start
        return Sample(
            seconds=seconds,
            phases=dict(clock.seconds),
            forward_rows=schedule.forward_rows,
            backward_rows=schedule.backward_rows,
        )

    @torch.no_grad()
    def _time_forward(self, micro_batch: int, repeats: int = 3) -> float:
        """F: seconds of one no-gradient forward of all the iteration's rows."""
        update = self._workload.update(self._workload.policy, Fraction(1.0), micro_batch)
        rows = update.rows(0, self._workload.prompts)
        requests = [update.request(rows[slice(k, k + micro_batch)]) for k in range(0, len(rows), micro_batch)]
        clock = PhaseClock(update.policy.device)
        for _ in range(repeats):
            for request in requests:
                with clock("forward"):
                    update.process.velocity_at(0, request.initial, request.conditioning)
        return clock.seconds["forward"] / repeats


def tables(comparison: Comparison) -> str:
    """The comparison as text."""
    sizes = sorted({size for by_size in comparison.search.values() for size in by_size})
    search = table(
        ["schedule", *(f"micro-batch {size}" for size in sizes)],
        [[name, *(f"{by_size[size]:.3f} s" for size in sizes)] for name, by_size in comparison.search.items()],
    )
    return "\n".join(
        [
            "\nthe same micro-batch for all",
            _table(comparison.same),
            "\nevery schedule at its own best micro-batch",
            _table(comparison.best),
            "\nlooking for the best micro-batch: median seconds at f = 1.0",
            search,
        ]
    )


def _table(results: Sequence[Result]) -> str:
    header = ["f", "|S|", "schedule", "micro-batch", "seconds [quartiles]", "speed-up [quartiles]", "bound", *PHASES]
    cells = [
        [
            f"{r.fraction:g}",
            str(r.trained_steps),
            r.schedule,
            str(r.micro_batch),
            f"{r.seconds.median:.3f} [{r.seconds.q1:.3f}, {r.seconds.q3:.3f}]",
            f"{r.speedup.median:.2f} [{r.speedup.q1:.2f}, {r.speedup.q3:.2f}]",
            f"{r.bound:.2f}",
            *(f"{r.phases[phase]:.3f}" for phase in PHASES),
        ]
        for r in results
    ]
    return table(header, cells)


def main(args: Sequence[str] | None = None) -> Comparison:
    """Run from the command line, print the tables, write ``step_time.json`` and ``step_time.png``."""
    asked = parse(StepTime, name="step_time", defaults=DEFAULTS, quick=QUICK, args=args)
    load_before = environment()["load_average"]
    comparison = asked.benchmark.run()
    print(f"$ {asked.command}\n{environment_line()}\n{tables(comparison)}")
    results: dict[str, Any] = {"load_average_before": load_before, **asdict(comparison)}
    write_json(
        asked.output / "step_time.json",
        benchmark="step_time", command=asked.command, settings=asked.settings, results=results,
    )  # fmt: skip
    draw(results, asked.output / "step_time.png")
    print(f"\nwritten: {asked.output / 'step_time.json'}, {asked.output / 'step_time.png'}")
    return comparison


if __name__ == "__main__":
    main()

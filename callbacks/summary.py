"""What a run achieved and what it cost: one table at the end, and the same numbers in ``summary.json``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger

from callbacks.benchmark import Benchmark
from callbacks.estimates import Evaluation, Measure
from callbacks.evaluation import HeldOutEvaluation
from callbacks.lookup import every_callback, first_callback
from callbacks.run_folder import run_folder, write_json
from callbacks.sample_grid import SampleGrid
from callbacks.versions import versions
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.types import PromptBatch

FILE = "summary.json"
PHASES = ("rollout", "decode", "reward", "update", "verify")
"""What an iteration's seconds are told apart by; ``verify`` is the lean schedules' check."""
ENDS = 10
"""Iterations at either end of a run that the training reward is averaged over; half of a shorter run."""
_SHOWN = [r"^reward($|/(?!.*_group_std$|.*_dropped_share$))", r"^(held_out|val|eval)/(?!.*_stderr$)[^/]+$"]
CHARTS = {"reward": {"training, held out, evaluated": ["Multiline", _SHOWN]}}
"""TensorBoard's custom scalars: one chart of every reward."""


class Summary(Callback):
    """Print the final table and write ``<run>/summary.json`` when ``fit`` ends.

    The held-out numbers are those of :class:`HeldOutEvaluation` (null without one), ``evaluations`` those of the benchmarks
    by name, ``training_rewards`` means over the first and the last :data:`ENDS` iterations. TensorBoard's tab Custom Scalars
    shows the three in one chart.

    Policy forwards are counted in batch rows and compared with Native's ``T + |S|`` per sample: T steps of the rollout and its
    |S| trained steps once more. Of the seconds, ``evaluation`` is the held-out evaluation and the benchmarks, ``samples`` the
    drawing of sample grids and ``total`` the wall clock of ``fit``. Resumed parts are included.
    """

    def __init__(self) -> None:
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._rows = {"forward": 0, "backward": 0}
        self._samples = self._dropped = 0
        self._rewards: dict[str, list[dict[str, float]]] = {"first": [], "last": []}
        self._earlier, self._start = 0.0, time.perf_counter()

    def on_fit_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._start = time.perf_counter()
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.is_global_zero:
                logger.experiment.add_custom_scalars(CHARTS)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        metrics = pl_module.iteration_metrics
        for phase in self._seconds:
            self._seconds[phase] += metrics.get(f"seconds/{phase}", 0.0)
        for direction in self._rows:
            self._rows[direction] += int(metrics[f"rows/{direction}"])
        self._samples += len(batch) * pl_module.generations_per_prompt
        self._dropped += int(metrics["dropped_samples"])
        rewards = {name: metrics[name] for name in metrics if _is_reward(name)}
        self._rewards["first"] = [*self._rewards["first"], rewards][:ENDS]
        self._rewards["last"] = [*self._rewards["last"], rewards][-ENDS:]

    def on_fit_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        if not trainer.is_global_zero:
            return
        folder = run_folder(trainer)
        content = self.content(trainer, pl_module)
        write_json(folder / FILE, content)
        print(table(content, folder), flush=True)

    def state_dict(self) -> dict[str, Any]:
        return {
            "seconds": dict(self._seconds),
            "rows": dict(self._rows),
            "samples": self._samples,
            "dropped": self._dropped,
            "rewards": self._rewards,
            "elapsed": self._elapsed(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._seconds, self._rows = dict(state_dict["seconds"]), dict(state_dict["rows"])
        self._samples, self._dropped = state_dict["samples"], state_dict["dropped"]
        self._rewards = state_dict.get("rewards", self._rewards)  # earlier checkpoints have none
        self._earlier = state_dict["elapsed"]

    def _elapsed(self) -> float:
        return self._earlier + time.perf_counter() - self._start

    def content(self, trainer: Trainer, pl_module: LeanGRPO) -> dict[str, Any]:
        """The numbers of the run so far, as ``summary.json`` holds them."""
        evaluation = first_callback(trainer, HeldOutEvaluation)
        grid = first_callback(trainer, SampleGrid)
        benchmarks = every_callback(trainer, Benchmark)
        seconds = self._seconds | {
            "evaluation": (evaluation.seconds if evaluation else 0.0) + sum(b.seconds for b in benchmarks),
            "samples": grid.seconds if grid else 0.0,
            "total": self._elapsed(),
        }
        return {
            "training_rewards": _ends(self._rewards, pl_module.iteration),
            **_held_out(evaluation),
            "evaluations": {benchmark.name: _benchmark(benchmark) for benchmark in benchmarks if benchmark.last},
            "schedule": type(pl_module.schedule).__name__,
            "iterations": pl_module.iteration,
            "samples": self._samples,
            "dropped_samples": self._dropped,
            "seconds": seconds,
            "policy_rows": _policy_rows(self._rows, self._samples, pl_module),
            "seed": pl_module.seed,
            "versions": versions(),
            "look_further": f"tensorboard --logdir {shlex.quote(str(run_folder(trainer)))}",
        }


def _is_reward(name: str) -> bool:
    return name == "reward" or (name.startswith("reward/") and not name.endswith(("_group_std", "_dropped_share")))


def _ends(rewards: dict[str, list[dict[str, float]]], iterations: int) -> dict[str, Any]:
    """Reward -> its mean over the first and the last iterations, and how many these are."""
    count = min(ENDS, max(1, iterations // 2))
    ends = {"first": rewards["first"][:count], "last": rewards["last"][-count:]}
    names = dict.fromkeys(name for row in ends["last"] for name in row)
    return {
        name: {end: _mean([row[name] for row in rows if name in row]) for end, rows in ends.items()}
        | {"iterations": count}
        for name in names
    }


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _benchmark(benchmark: Benchmark) -> dict[str, Any]:
    """Metric -> what :func:`_change` says of it; the first one is the headline."""
    last, first = benchmark.last, benchmark.first
    assert last is not None
    if first is not None and (first.iteration == last.iteration or not last.comparable(first)):
        first = None
    return {name: _change(first, last, measure) for name, measure in benchmark.measures(last).items()}


def _policy_rows(rows: dict[str, int], samples: int, pl_module: LeanGRPO) -> dict[str, Any]:
    native = samples * (len(pl_module.sigma_grid) - 1 + pl_module.trained_steps)
    return {
        "forward": rows["forward"],
        "backward": rows["backward"],
        "native_forward": native,
        "saved_share": 1.0 - rows["forward"] / native if native else None,
    }


def _held_out(evaluation: HeldOutEvaluation | None) -> dict[str, Any]:
    """``held_out_reward`` (the main one) and ``other_held_out_rewards`` by name."""
    if evaluation is None or evaluation.after is None:
        return {"held_out_reward": None, "other_held_out_rewards": {}}
    others = [name for name in evaluation.rewards if name != evaluation.main]
    before, after = evaluation.before, evaluation.after
    return {
        "held_out_reward": {"name": evaluation.main} | _change_of_reward(before, after, evaluation.main),
        "other_held_out_rewards": {name: _change_of_reward(before, after, name) for name in others},
    }


def _change_of_reward(before: Evaluation | None, after: Evaluation, name: str) -> dict[str, Any]:
    return _change(before, after, Measure(reward=name)) | {
        "per_category": {
            tag: {"before": before and before.estimate(name, tag).mean, "after": after.estimate(name, tag).mean}
            for tag in after.categories
        },
    }


def _change(before: Evaluation | None, after: Evaluation, measure: Measure) -> dict[str, Any]:
    """``stderr`` is that of the paired difference. What needs a missing ``before`` is None."""
    earlier = None if before is None else before.measure(measure)
    paired = None if before is None else after.measured_change(before, measure)
    later = after.measure(measure)
    return {
        "before": earlier and earlier.mean,
        "after": later.mean,
        "difference": paired and paired.mean,
        "stderr": paired and paired.stderr,
        "before_stderr": earlier and earlier.stderr,
        "after_stderr": later.stderr,
        "before_iteration": before and before.iteration,
        "after_iteration": after.iteration,
        "prompts": len(after.prompts),
        "images_per_prompt": max(after.images),
    }


def table(content: dict[str, Any], folder: Path) -> str:
    """The numbers of ``summary.json`` for a person to read, about 90 columns wide."""
    saved = content["policy_rows"]["saved_share"]
    rows = content["policy_rows"]
    lines = [
        "",
        f"{content['schedule']}: {content['iterations']} iterations, {content['samples']} samples"
        + (f" ({content['dropped_samples']} dropped)" if content["dropped_samples"] else "")
        + f", seed {content['seed']}",
        "",
        *_held_out_lines(content),
        *_benchmark_lines(content),
        *_training_lines(content),
        "",
        "seconds          " + "  ".join(f"{phase} {s:.1f}" for phase, s in content["seconds"].items() if s),
        f"policy forwards  {rows['forward']} rows; Native: {rows['native_forward']}"
        + ("" if saved is None else f" ({saved:.0%} saved)" if saved >= 0.005 else " (none saved)"),
        f"policy backwards {rows['backward']} rows",
        "",
        f"written          {folder / FILE}",
        f"look further     {content['look_further']}",
    ]
    return "\n".join(lines)


def _held_out_lines(content: dict[str, Any]) -> list[str]:
    main = content["held_out_reward"]
    if main is None:
        return ["held-out reward  not evaluated (add callbacks.evaluation.HeldOutEvaluation to see what was gained)"]
    size = f"{main['prompts']} prompts x {main['images_per_prompt']} images"
    lines = [
        f"held-out reward, {size}, +- one standard error clustered by prompt",
        _row("", "before", "after", "change"),
    ]
    lines.append(_estimates(main["name"], main))
    lines += [
        _row(f"  {tag}", _number(row["before"]), _number(row["after"]), _signed(row["before"], row["after"]))
        for tag, row in main["per_category"].items()
    ]
    return lines + [_estimates(name, row) for name, row in content["other_held_out_rewards"].items()]


def _benchmark_lines(content: dict[str, Any]) -> list[str]:
    """The headline of each benchmark."""
    headlines = {
        f"{name} {next(iter(rows))}": next(iter(rows.values())) for name, rows in content["evaluations"].items()
    }
    return ["", "benchmarks", *(_estimates(name, row) for name, row in headlines.items())] if headlines else []


def _training_lines(content: dict[str, Any]) -> list[str]:
    rows = content["training_rewards"]
    if not rows:
        return []
    count = next(iter(rows.values()))["iterations"]
    head = f"training reward, mean of the first and of the last {count} iteration{'s' if count > 1 else ''}"
    return ["", head] + [
        _row(f"  {name}", _number(row["first"]), _number(row["last"]), _signed(row["first"], row["last"]))
        for name, row in rows.items()
    ]


def _estimates(name: str, row: dict[str, Any]) -> str:
    pairs: list[tuple[str, str, Callable[[float | None], str]]] = [
        ("before", "before_stderr", _number),
        ("after", "after_stderr", _number),
        ("difference", "stderr", lambda value: "n/a" if value is None else f"{value:+.3f}"),
    ]
    return _row(name, *(f"{show(row[mean])} +- {_number(row[error])}" for mean, error, show in pairs))


def _row(name: str, *cells: str) -> str:
    return f"{name:<24}" + "".join(f"{cell:<20}" for cell in cells).rstrip()


def _number(value: float | None) -> str:
    return "n/a" if value is None or value != value else f"{value:.3f}"


def _signed(before: float | None, after: float | None) -> str:
    return "n/a" if before is None or after is None else f"{after - before:+.3f}"

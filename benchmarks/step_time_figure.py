"""The step-time result as one picture: speed-up over the timestep fraction with the bound, and the phases stacked."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COLOR = {"Native": "black", "Retain": "#0072B2", "Reweight": "#D55E00"}
_MARKER = {"Native": "s", "Retain": "o", "Reweight": "^"}
_PHASES = {
    "rollout": ("rollout forwards", "#56B4E9"),
    "update": ("recomputation / correction", "#D55E00"),
    "backward": ("backward", "#0072B2"),
    "decode": ("decode", "#F0E442"),
    "reward": ("reward", "#009E73"),
    "optimizer": ("clip + AdamW", "#CC79A7"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """``results``: as in the JSON file."""
    figure = Figure(figsize=(12.5, 9), layout="constrained")
    grid = figure.subplots(2, 2, sharey="col", width_ratios=[1, 1.5])
    for row, (kind, title) in enumerate((("same", "the same micro-batch"), ("best", "each at its best micro-batch"))):
        _speedup(grid[row, 0], results[kind], title)
        _phases(grid[row, 1], results[kind], title)
    both = [*results["same"], *results["best"]]
    grid[0, 0].set_ylim(0, 1.45 * max(max(r["speedup"]["median"], r["bound"]) for r in both))
    grid[0, 1].set_ylim(0, 1.15 * max(sum(r["phases"].values()) for r in both))
    handles, labels = grid[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper right", ncols=len(labels), frameon=False, fontsize=9)
    figure.savefig(path, dpi=130)


def _speedup(axes: Axes, results: Sequence[dict[str, Any]], title: str) -> None:
    for name, color in _COLOR.items():
        mine = [r for r in results if r["schedule"] == name]
        fractions, medians = [r["fraction"] for r in mine], [r["speedup"]["median"] for r in mine]
        label = f"{name} (micro-batch {mine[0]['micro_batch']})"
        axes.plot(fractions, medians, color=color, marker=_MARKER[name], label=label, linewidth=1.4)
        if name == "Native":
            axes.plot(
                fractions, [r["bound"] for r in mine], color="0.45", linestyle="--", label="bound t / (t − |S| F)"
            )
        else:
            low, high = [r["speedup"]["q1"] for r in mine], [r["speedup"]["q3"] for r in mine]
            axes.fill_between(fractions, low, high, color=color, alpha=0.15, linewidth=0)
    axes.set_title(f"speed-up over Native, {title}", fontsize=10)
    axes.set_xlabel("timestep fraction f")
    axes.set_ylabel("speed-up (band: quartiles of the rounds)")
    axes.set_xticks(sorted({r["fraction"] for r in results}))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, loc="upper left", ncols=2)


def _phases(axes: Axes, results: Sequence[dict[str, Any]], title: str) -> None:
    names = list(_COLOR)
    fractions = sorted({r["fraction"] for r in results})
    places = [fractions.index(r["fraction"]) * (len(names) + 1) + names.index(r["schedule"]) for r in results]
    bottom = [0.0] * len(results)
    for phase, (label, color) in _PHASES.items():
        heights = [r["phases"][phase] for r in results]
        axes.bar(places, heights, bottom=bottom, color=color, label=label, width=0.85)
        bottom = [b + h for b, h in zip(bottom, heights, strict=True)]
    axes.set_xticks(places, [r["schedule"] for r in results], rotation=60, fontsize=8)
    for k, fraction in enumerate(fractions):
        middle = k * (len(names) + 1) + (len(names) - 1) / 2
        axes.annotate(f"f = {fraction:g}", (middle, 0.94), xycoords=("data", "axes fraction"), ha="center", fontsize=9)
    axes.set_title(f"seconds per iteration by phase, {title}", fontsize=10)
    axes.set_ylabel("median seconds")
    axes.grid(axis="y", alpha=0.3)

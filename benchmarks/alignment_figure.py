"""The alignment result as one picture: relative L2 distances on a logarithmic axis, one panel per precision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

_QUANTITIES = {"gradient": "gradient", "update": "AdamW update", "exp_avg": "1st moment", "exp_avg_sq": "2nd moment"}
_STYLE = {
    "Native": ("black", "s"),
    "Native, one row at a time": ("0.55", "D"),
    "Retain": ("#0072B2", "o"),
    "Reweight, per sample": ("#D55E00", "^"),
    "Reweight, streaming": ("#E69F00", "v"),
}
_PANELS = (
    ("fixed", "native", "fixed trajectory:\nrelative L2 to Native"),
    ("fixed", "float64", "fixed trajectory:\nrelative L2 to float64"),
    ("end to end", "native", "end to end, iteration 1:\nrelative L2 to Native"),
)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """``rows``: the records of the JSON file."""
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    figure = Figure(figsize=(1.6 + 3.6 * len(precisions), 9.5), layout="constrained")
    grid = figure.subplots(len(_PANELS), len(precisions), squeeze=False, sharey="row")
    for axes, precision in zip(grid[0], precisions, strict=True):
        axes.set_title(precision)
    for axes_row, (trajectory, against, label) in zip(grid, _PANELS, strict=True):
        values = {
            (row["precision"], row["schedule"], row["quantity"]): row[against]["relative_l2"]
            for row in rows
            if row["trajectory"] == trajectory and row["iteration"] == 1
        }
        floor = min((v for v in values.values() if v > 0), default=1e-8) / 30
        for axes, precision in zip(axes_row, precisions, strict=True):
            _panel(axes, {key[1:]: v for key, v in values.items() if key[0] == precision}, floor, against)
        axes_row[0].set_ylabel(label)
        axes_row[0].set_ylim(floor / 2, 5 * max(values.values(), default=1.0) or 1.0)
    handles, labels = grid[1, 0].get_legend_handles_labels()
    zero = Line2D([], [], color="0.4", marker="o", fillstyle="none", linestyle=":")
    figure.legend(
        [*handles, zero],
        [*labels, "hollow, on the dotted line: exactly 0"],
        loc="outside upper center",
        ncols=3,
        frameon=False,
    )
    figure.savefig(path, dpi=130)


def _panel(axes: Axes, values: dict[tuple[str, str], float], floor: float, against: str) -> None:
    shown = [name for name in _STYLE if against == "float64" or name != "Native"]
    for k, name in enumerate(shown):
        color, marker = _STYLE[name]
        heights = [values[name, quantity] for quantity in _QUANTITIES]
        places = [q + 0.16 * (k - (len(shown) - 1) / 2) for q in range(len(_QUANTITIES))]
        filled = ["none" if height == 0 else color for height in heights]
        axes.scatter(places, [h or floor for h in heights], c=filled, edgecolors=color, marker=marker, s=34, label=name)
    axes.set_yscale("log")
    axes.set_xticks(range(len(_QUANTITIES)), list(_QUANTITIES.values()), rotation=20)
    axes.grid(axis="y", alpha=0.3)
    if any(height == 0 for height in values.values()):
        axes.axhline(floor, color="0.7", linewidth=0.8, linestyle=":", zorder=0)

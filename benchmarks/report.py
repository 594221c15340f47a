"""What a benchmark leaves: a table on the screen, a JSON file that can be checked and repeated."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it also reads well as plain text."""
    widths = [max(len(row[k]) for row in [header, *rows]) for k in range(len(header))]
    lines = [header, ["-" * width for width in widths], *rows]
    return "\n".join(
        "| " + " | ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)) + " |" for line in lines
    )


def write_json(path: Path, *, benchmark: str, command: str, settings: dict[str, Any], results: dict[str, Any]) -> None:
    """One object: how to repeat it (command, settings, environment) and what was measured. No NaN, no infinity."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {
        "benchmark": benchmark,
        "command": command,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(),
        "settings": settings,
        "results": results,
    }
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def environment() -> dict[str, Any]:
    """Hardware and versions that numbers depend on."""
    return {
        "commit": _commit(),
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": list(os.getloadavg()),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "diffusers", "lightning", "numpy")},
    }


def environment_line() -> str:
    """The same in one line."""
    e = environment()
    load = e["load_average"][0]
    return f"{e['cpu']}, {e['threads']} threads, torch {e['versions']['torch']}, commit {e['commit']}, load average {load:.1f}"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """The processor's name: Linux tells it best."""
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if line.startswith("model name")] if info.is_file() else []
    return names[0].partition(":")[2].strip() if names else platform.processor() or platform.machine()


def _commit() -> str | None:
    """Commit of the sources, with ``+`` where they have been changed since; ``None`` outside a repository."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--", "..") else "")
    except (OSError, subprocess.CalledProcessError):
        return None

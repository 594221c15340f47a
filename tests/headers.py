"""The comment at the top of an experiment's config."""

from __future__ import annotations

from pathlib import Path


def header_of(file: Path) -> str:
    """As one line."""
    lines = file.read_text().split("\n\n")[0].splitlines()
    assert all(line.startswith("#") for line in lines)
    return " ".join(" ".join(line.removeprefix("#") for line in lines).split())

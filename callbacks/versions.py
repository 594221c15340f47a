"""The versions of what a number was made with."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

PACKAGES = (
    "leangrpo", "torch", "torchvision", "lightning", "diffusers", "transformers", "peft", "open_clip_torch", "numpy", "pillow",
)  # fmt: skip


def versions() -> dict[str, str | None]:
    """Python and :data:`PACKAGES` -> version; ``None`` where a package is not installed."""
    return {"python": platform.python_version()} | {package: _version(package) for package in PACKAGES}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None

"""A whole transformer in diffusers' format: ``config.json`` and safetensors, for ``from_pretrained``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from lightning_modules.export.probe import Probe

TOLERANCE = {torch.float32: 1e-4, torch.float16: 0.01, torch.bfloat16: 0.05}
"""Relative distance of two velocities from equal weights, which may be computed on a GPU and on the CPU."""


def write_full(transformer: Any, folder: Path) -> None:
    """Write all weights, each in its own dtype."""
    transformer.save_pretrained(folder)


def check_full(policy: Any, folder: Path) -> None:
    """Load the files into a fresh transformer on the CPU: every tensor has to be equal bit for bit, and so, as far as the
    precision allows, the velocity, which shows that the configuration fits. Errors: ``RuntimeError`` otherwise."""
    trained = policy.transformer
    probe = Probe(policy)
    velocity = probe(policy)
    loaded = type(trained).from_pretrained(folder, torch_dtype=trained.dtype, local_files_only=True).eval()
    theirs = loaded.state_dict()
    for name, tensor in trained.state_dict().items():
        if not torch.equal(theirs[name].to(tensor.dtype), tensor.cpu()):
            raise RuntimeError(f"{name} in the exported files is not what was trained; nothing is kept")
    policy.transformer = loaded
    try:
        error = ((probe(policy) - velocity).norm() / velocity.norm()).item()
    finally:
        policy.transformer = trained
    if not error <= TOLERANCE[trained.dtype]:
        raise RuntimeError(
            f"the exported transformer's velocity is {error:.1%} away from the trained one's: its config.json does not "
            "describe it; nothing is kept"
        )

"""What makes a checkpoint exact beyond weights and optimizer: the random states, and a check that it is ours."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import nn


def rng_state() -> dict[str, Any]:
    """States of the global generators (Python, NumPy, torch, CUDA) as plain values and tensors. The rollout's own noise
    is keyed and needs none of them; rewards and data may."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "python": (version, list(internal), gauss),
        "numpy": (name, keys.tolist(), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def restore_rng_state(state: dict[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"].cpu())
    if torch.cuda.is_available() and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([s.cpu() for s in state["cuda"]])


def check_checkpoint(checkpoint: dict[str, Any], policy: nn.Module) -> dict[str, Any]:
    """The run's own part of a checkpoint. Errors: ``ValueError`` if it was written by something else, or for another
    policy."""
    if "lean_grpo" not in checkpoint:
        raise ValueError("this checkpoint was not written by LeanGRPO: give one from a run's checkpoints/ folder")
    mine = {f"policy.{name}": tuple(tensor.shape) for name, tensor in policy.state_dict().items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in checkpoint["state_dict"].items()}
    if mine != theirs:
        differing = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        raise ValueError(
            f"this checkpoint holds another policy: {len(differing)} tensors differ, first {differing[0]} "
            f"(checkpoint {theirs.get(differing[0])}, config {mine.get(differing[0])}); use the run's own config.yaml"
        )
    return checkpoint["lean_grpo"]

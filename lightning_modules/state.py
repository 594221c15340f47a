"""What a checkpoint holds: of the weights only the trained ones, with the name of the frozen ones they belong to; the
optimizer; and what makes a resume exact: the random states and the trainer's own counters. And a check that it is ours.

Whenever a checkpoint is taken, also in the middle of an iteration that failed, it is that of the last completed one.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


def rng_state() -> dict[str, Any]:
    """States of the global generators (Python, NumPy, torch, CUDA) as plain values and tensors. The rollout's own noise
    is keyed and needs none of them; rewards and data may."""
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    return {
        "python": (version, list(internal), gauss),
        "numpy": (name, np.asarray(keys).tolist(), position, has_gauss, cached),
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


class ResumePoint:
    """The random states that the running iteration started from, and whether it has moved the policy since."""

    def __init__(self) -> None:
        self._start: dict[str, Any] | None = None
        self._moved = False

    def begin(self) -> None:
        """An iteration starts: where an earlier one was broken off, or a checkpoint loaded, from its random states."""
        if self._start is None:
            self._start = rng_state()
        else:
            restore_rng_state(self._start)

    def move(self) -> None:
        """The policy is about to change: until :meth:`complete` no checkpoint can stand for a completed iteration."""
        self._moved = True

    @property
    def moved(self) -> bool:
        """Whether the policy has changed since the last completed iteration."""
        return self._moved

    def complete(self) -> None:
        self._start = None
        self._moved = False

    def rng(self) -> dict[str, Any]:
        """Random states that the next iteration is to start from. Errors: ``RuntimeError`` in the middle of an update."""
        if self._moved:
            raise RuntimeError(
                "the policy has moved but its iteration is not complete, so a checkpoint could not be resumed exactly; "
                "use the last one written"
            )
        return rng_state() if self._start is None else self._start

    def load(self, rng: dict[str, Any]) -> None:
        """Start the next iteration from these random states, whatever is drawn before it (loaders draw seeds)."""
        self._start = rng
        self._moved = False


def settle_loops(loops: dict[str, Any], iteration: int) -> None:
    """Set the fit loop's counters of a checkpoint to ``iteration`` batches done of an epoch that goes on.

    Lightning counts a batch at four moments and an epoch at four others; which of them a checkpoint has seen depends on
    the hook it was taken in. Settled, it resumes at batch ``iteration`` wherever it was taken, validates anew, and a
    finished run can be extended (its epoch would count as over).
    """
    done = dict.fromkeys(("ready", "started", "processed", "completed"), iteration)
    none = dict.fromkeys(done, 0)
    open_epoch = none | {"ready": 1, "started": 1}
    fit = loops["fit_loop"]
    fit["epoch_progress"] = {"total": dict(open_epoch), "current": dict(open_epoch)}
    fit["epoch_loop.batch_progress"] = {"total": dict(done), "current": dict(done), "is_last_batch": False}
    fit["epoch_loop.val_loop.batch_progress"] = {"total": dict(none), "current": dict(none), "is_last_batch": False}
    fit["epoch_loop.state_dict"]["_batches_that_stepped"] = iteration


def trained_part(state: dict[str, Tensor], policy: nn.Module) -> dict[str, Tensor]:
    """Of a LightningModule's state dict what training changes: the policy's parameters that require gradients."""
    names = [f"policy.{name}" for name, parameter in policy.named_parameters() if parameter.requires_grad]
    return {name: state[name] for name in names}


def check_checkpoint(checkpoint: dict[str, Any], policy: nn.Module, frozen: str, path: object) -> dict[str, Any]:
    """The run's own part of a checkpoint read from ``path``. ``frozen``: fingerprint of the policy's frozen weights.

    Errors: ``ValueError`` if the file was written by something else, or for another policy: other trained tensors, or
    other frozen weights under them.
    """
    if "lean_grpo" not in checkpoint:
        raise ValueError(f"{path} was not written by LeanGRPO: give a checkpoint from a run's checkpoints/ folder")
    state = {f"policy.{name}": tensor for name, tensor in policy.state_dict().items()}
    mine = {name: tuple(tensor.shape) for name, tensor in trained_part(state, policy).items()}
    theirs = {name: tuple(tensor.shape) for name, tensor in checkpoint["state_dict"].items()}
    if mine != theirs:
        differing = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
        raise ValueError(
            f"{path} holds another policy: {len(differing)} tensors differ, first {differing[0]} "
            f"(checkpoint {theirs.get(differing[0])}, config {mine.get(differing[0])}); use the run's own config.yaml"
        )
    if checkpoint["lean_grpo"]["frozen"] != frozen:
        raise ValueError(
            f"{path} was trained on other frozen weights than the config's policy has (another base model, revision or "
            "dtype), so what was trained does not fit them; use the run's own config.yaml"
        )
    return checkpoint["lean_grpo"]

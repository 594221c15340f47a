"""Callbacks that build on another one find it in their trainer."""

from __future__ import annotations

from typing import TypeVar

from lightning.pytorch import Callback, Trainer

C = TypeVar("C", bound=Callback)


def first_callback(trainer: Trainer, kind: type[C]) -> C | None:
    """The first callback of this class, or ``None``."""
    callbacks: list[Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
    return next((callback for callback in callbacks if isinstance(callback, kind)), None)

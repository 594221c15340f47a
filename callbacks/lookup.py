"""Callbacks that build on another one find it in their trainer."""

from __future__ import annotations

from typing import TypeVar

from lightning.pytorch import Callback, Trainer

C = TypeVar("C", bound=Callback)


def first_callback(trainer: Trainer, kind: type[C]) -> C | None:
    """The first callback of this class, or ``None``."""
    return next(iter(every_callback(trainer, kind)), None)


def every_callback(trainer: Trainer, kind: type[C]) -> list[C]:
    """All callbacks of this class, in their order."""
    callbacks: list[Callback] = trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue] (set by a connector)
    return [callback for callback in callbacks if isinstance(callback, kind)]

"""The benchmarks' command line: ``python -m benchmarks.<name> [--config FILE] [--quick] [--output DIR] [--<setting> ...]``.

Every field of a benchmark is a flag and a key of ``--config``'s YAML; ``--print_config`` writes such a file, with every
setting, to start from. A flag after ``--config`` wins over the file, the file over ``--quick``, ``--quick`` over the
defaults.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from jsonargparse import ArgumentParser

T = TypeVar("T")
_ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Invocation(Generic[T]):
    """A benchmark as asked for."""

    benchmark: T
    settings: dict[str, Any]
    """every setting, in plain types."""
    output: Path
    """folder for the results."""
    command: str
    """the command line that repeats it."""


def parse(
    kind: type[T], *, name: str, defaults: Mapping[str, Any], quick: Mapping[str, Any], args: Sequence[str] | None
) -> Invocation[T]:
    """Read the command line of the dataclass ``kind``, which has a field ``workload``."""
    given = list(sys.argv[1:] if args is None else args)
    parser = ArgumentParser(prog=f"python -m benchmarks.{name}", description=kind.__doc__)
    parser.add_argument("--config", action="config", help="YAML file of settings")
    parser.add_argument("--quick", action="store_true", help="a tiny untrained model: seconds, to try the command out")
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"), help="folder for the results")
    parser.add_class_arguments(kind, None)
    parser.set_defaults(dict(defaults))
    if "--quick" in given:
        parser.set_defaults(dict(quick))
    config = parser.parse_args(given)
    torch.manual_seed(config.workload.seed)  # a randomly initialised policy is part of the settings
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.49
    objects = instantiate(config)
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return Invocation(
        benchmark=kind(**{field: objects[field] for field in names}),
        settings={field: _plain(config[field]) for field in names},
        output=objects["output"],
        command=shlex.join(["python", "-m", f"benchmarks.{name}", *given]),
    )


def _plain(value: Any) -> Any:
    """Namespaces -> what JSON holds. Files of the repository are named relative to it."""
    if isinstance(value, str):
        return value.removeprefix(f"{_ROOT}/")
    if hasattr(value, "as_dict"):
        value = value.as_dict()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value

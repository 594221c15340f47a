"""Imports run downwards only, and only the shells know Lightning.

A *room* is a top-level package or, inside ``lightning_modules``, a folder or a module of its own.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGES = ("lightning_modules", "datamodules", "rewards", "callbacks", "benchmarks")
TYPES = "lightning_modules.types"
CORE = {f"lightning_modules.{room}" for room in ("objectives", "policies", "flow", "parallel")}
PURE = {TYPES, "lightning_modules.advantages", "lightning_modules.state", "lightning_modules.telemetry"}
SCHEDULES = "lightning_modules.schedules"
ITERATION = "lightning_modules.iteration"
PLAN = "lightning_modules.plan"
EXPORT = "lightning_modules.export"
STRATEGIES = "lightning_modules.strategies"
DRAWING = "lightning_modules.drawing"
SHELLS = {"lightning_modules.lean_grpo", "lightning_modules.flow_matching"}
BELOW_SHELLS = {DRAWING, EXPORT, ITERATION, PLAN, STRATEGIES, SCHEDULES, *CORE, *PURE, "datamodules"}
EVERYTHING = {*SHELLS, *BELOW_SHELLS, "rewards", "callbacks"}

MAY_IMPORT: dict[str, set[str]] = {
    "train": EVERYTHING,
    "benchmarks": {"train", *EVERYTHING},
    "callbacks": {TYPES, "lightning_modules.parallel", "rewards", "datamodules", *SHELLS},
    **dict.fromkeys(SHELLS, BELOW_SHELLS),
    ITERATION: {SCHEDULES, *CORE, *PURE},
    PLAN: {SCHEDULES, *CORE, *PURE},
    DRAWING: {*CORE, *PURE},
    EXPORT: {*CORE, *PURE},
    STRATEGIES: {*CORE, *PURE},
    SCHEDULES: {*CORE, *PURE},
    **dict.fromkeys(CORE, {*CORE, TYPES}),
    **dict.fromkeys(PURE, {TYPES}),
    TYPES: set(),
    "datamodules": {TYPES},
    "rewards": set(),
}
MAY_IMPORT_LIGHTNING = {
    "train", "callbacks", "benchmarks", *SHELLS, DRAWING, STRATEGIES, "datamodules.prompt_data", "datamodules.shapes",
}  # fmt: skip
LIGHTNING = {"lightning", "pytorch_lightning", "lightning_fabric"}


def sources(root: Path) -> Iterator[tuple[str, Path]]:
    """(dotted module name, file) of the product."""
    files = [root / "train.py", *(file for package in PACKAGES for file in sorted((root / package).rglob("*.py")))]
    for file in files:
        if file.is_file():
            yield ".".join(file.relative_to(root).with_suffix("").parts).removesuffix(".__init__"), file


def imported(file: Path, module: str) -> set[str]:
    """Dotted names a file imports, at any depth of nesting and under ``TYPE_CHECKING`` as well."""
    names: set[str] = set()
    package = module if file.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            prefix = parts[: len(parts) - node.level + 1] if node.level else []
            base = ".".join([*prefix, *([node.module] if node.module else [])])
            # `from a.b import c` may import the module a.b.c; a class c only makes the name longer
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def room(name: str) -> str | None:
    """The room of a dotted name, None outside the product."""
    parts = name.split(".")
    if parts[0] == "lightning_modules":
        return ".".join(parts[:2])
    return parts[0] if parts[0] in (*PACKAGES, "train") else None


def violations(root: Path) -> list[str]:
    found = []
    for module, file in sources(root):
        home = room(module)
        if home == "lightning_modules":  # the package's own __init__.py
            allowed: set[str] = set()
        elif home not in MAY_IMPORT:
            found.append(f"{module}: a new room; give it a place in MAY_IMPORT")
            continue
        else:
            allowed = MAY_IMPORT[home] | {home}
        for name in sorted(imported(file, module)):
            target = room(name)
            if target is not None and target not in allowed:
                found.append(f"{module} imports {name}")
            if name.split(".")[0] in LIGHTNING and not {module, home} & MAY_IMPORT_LIGHTNING:
                found.append(f"{module} imports {name}, but is no shell")
    return found


def test_the_product_keeps_its_layers(repository):
    assert violations(repository) == []


def test_no_two_rooms_import_each_other(repository):
    graph: dict[str, set[str]] = {}
    for module, file in sources(repository):
        home = room(module)
        targets = {room(name) for name in imported(file, module)} - {None, home}
        graph.setdefault(home, set()).update(targets)
    assert list(TopologicalSorter(graph).static_order())  # CycleError otherwise


@pytest.mark.parametrize(
    ("file", "statement", "complaint"),
    [
        (
            "lightning_modules/flow/sigmas.py",
            "from lightning_modules.schedules.base import Schedule",
            "imports lightning_modules.sch",
        ),
        (
            "lightning_modules/flow/sigmas.py",
            "from ..schedules import base",
            "imports lightning_modules.schedules.base",
        ),
        ("lightning_modules/flow/sigmas.py", "def f():\n    import lightning.pytorch", "is no shell"),
        (
            "lightning_modules/schedules/base.py",
            "import lightning_modules.lean_grpo",
            "imports lightning_modules.lean_grpo",
        ),
        (
            "lightning_modules/advantages.py",
            "from lightning_modules.flow import sigmas",
            "imports lightning_modules.flow",
        ),
        ("lightning_modules/lean_grpo.py", "import callbacks.scoring", "imports callbacks.scoring"),
        ("rewards/shapes.py", "import datamodules.shapes_world", "imports datamodules.shapes_world"),
        ("rewards/shapes.py", "from lightning_modules.types import Rows", "imports lightning_modules.types"),
        ("datamodules/prompts.py", "import lightning as L", "is no shell"),
        ("datamodules/prompts.py", "from lightning_modules import advantages", "imports lightning_modules.advantages"),
        ("callbacks/scoring.py", "from lightning_modules.schedules import base", "imports lightning_modules.schedules"),
        ("lightning_modules/extra/thing.py", "", "a new room"),
    ],
)
def test_a_planted_violation_is_found(tmp_path, file, statement, complaint):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(statement)
    (message,) = violations(tmp_path)
    assert complaint in message


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("lightning_modules/lean_grpo.py", "import lightning\nfrom lightning_modules.schedules.base import Schedule"),
        (
            "lightning_modules/objectives/a.py",
            "from lightning_modules.flow.transitions import Transition\nimport torch",
        ),
        ("datamodules/prompt_data.py", "import lightning as L\nfrom lightning_modules.types import PromptBatch"),
        ("callbacks/scoring.py", "from lightning.pytorch import Callback\nfrom rewards.base import Reward"),
    ],
)
def test_what_the_layers_allow_passes(tmp_path, file, statement):
    planted = tmp_path / file
    planted.parent.mkdir(parents=True)
    planted.write_text(statement)
    assert violations(tmp_path) == []

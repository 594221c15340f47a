"""Result files: numbers together with all that produced them.

``result.json`` of an evaluation holds

``settings``
    what two results must share to be compared: prompts, sampler, steps, guidance, size, noise, rewards;
``model``, ``checkpoint``
    what was evaluated: the policy, fingerprints of its weights, the iteration, and the checkpoint's SHA-256;
``versions``
    of the libraries;
``metrics``, ``other``
    means with standard errors, and numbers without;
``prompts``
    the score of every image, prompt by prompt, from which the metrics follow and paired differences are made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from callbacks.estimates import Evaluation, Measure
from datamodules.prompts import Prompt
from lightning_modules.parallel.ranks import Ranks

FORMAT = "leangrpo-evaluation-1"
FILE = "result.json"

Result = dict[str, Any]
"""The content of a result file."""


def metrics_of(evaluation: Evaluation, measures: Mapping[str, Measure]) -> dict[str, dict[str, Any]]:
    """Name -> ``mean``, ``stderr`` and the fields of its :class:`Measure`, by which :func:`measures_of` finds it again."""
    estimates = {name: evaluation.measure(measure) for name, measure in measures.items()}
    return {
        name: {"mean": e.mean, "stderr": e.stderr, **asdict(measures[name])} for name, e in estimates.items()
    }  # fmt: skip


def measures_of(result: Result) -> dict[str, Measure]:
    """What the metrics of a result measure, by name."""
    fields = ("reward", "tag", "balanced")
    return {name: Measure(**{f: row[f] for f in fields}) for name, row in result["metrics"].items()}


def evaluation_of(result: Result) -> Evaluation:
    """The scores of a result."""
    return Evaluation.of(result["prompts"], result["model"]["iteration"])


def read_result(path: str | Path) -> Result:
    """Read a result file, or the one in a folder. Errors: ``ValueError`` naming the path and the remedy."""
    file = Path(path) / FILE if Path(path).is_dir() else Path(path)
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else f"no valid JSON: {error}"
        raise ValueError(f"cannot read {file} ({reason}): give the {FILE} of an evaluation, or its folder") from error
    if not isinstance(result, dict) or result.get("format") != FORMAT:
        raise ValueError(f"{file} is no {FORMAT} file: give the {FILE} of an evaluation, or its folder")
    return result


def digest(prompts: Sequence[Prompt]) -> str:
    """SHA-256 of prompts and metadata, in their order; the file they came from and how it was written do not matter."""
    rows = [[prompt.text, prompt.metadata] for prompt in prompts]
    return hashlib.sha256(json.dumps(rows, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


@contextmanager
def result_folder(path: Path, ranks: Ranks, what: str) -> Iterator[Path]:
    """On all ranks together: an empty folder that becomes ``path``, in place of what is there, when the block ends well.
    Where it fails ``path`` stays as it was; what a killed process left behind is removed by the next one.

    Errors: ``ValueError`` where nothing can be written, on every rank.
    """
    partial, old = (path.with_name(f".{path.name}.{state}") for state in ("partial", "old"))
    first = ranks.rank == 0

    def begin() -> None:
        with writing(path):
            for leftover in (partial, old):
                shutil.rmtree(leftover, ignore_errors=True)
            partial.mkdir(parents=True)

    def end() -> None:
        with writing(path):
            if path.exists():
                os.replace(path, old)
            os.replace(partial, path)
            shutil.rmtree(old, ignore_errors=True)

    try:
        ranks.share(lambda: begin() if first else None, what)
        yield partial
        ranks.share(lambda: end() if first else None, what)
    finally:
        if first:
            shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """``OSError`` -> ``ValueError`` that names the place and the remedy."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"cannot write {path}: {error.strerror or error}; free some space or give another folder, then evaluate again"
        ) from error


def file_sha256(path: str | Path | None) -> str | None:
    """SHA-256 of a file, in hexadecimal; ``None`` without a file (a sharded checkpoint is a folder)."""
    if path is None or not Path(path).is_file():
        return None
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

"""Compare evaluations: ``python -m callbacks.compare base/result.json trained/result.json [more ...]``.

Every further result is compared with the first one, metric by metric: both means, and the difference with its 95 % confidence
interval (:mod:`callbacks.estimates`). Where both have the same prompts and as many images of each, differences are paired and
clustered by prompt. Results whose settings differ (prompts, sampler, steps, guidance, size, seed, rewards, ...) are refused,
and what differs is named; ``--allow sampler.guidance`` accepts one difference, or a group of them such as ``sampler``,
``--allow all`` any. Other versions of libraries and other devices are told, not refused.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from callbacks.estimates import Estimate, Evaluation, Measure, difference
from callbacks.results import Result, evaluation_of, measures_of, read_result

LEVEL = 0.95
_MISSING = "(not there)"


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One metric of one result against the baseline's."""

    metric: str
    baseline: Estimate
    other: Estimate
    change: Estimate
    paired: bool
    """Whether the same prompts, with as many images of each, were evaluated."""


def differing(first: Any, second: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """``(dotted name, value, value)`` of every leaf in which two nests of dicts differ."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        for name in sorted(first.keys() | second.keys()):
            yield from differing(first.get(name, _MISSING), second.get(name, _MISSING), f"{path}.{name}".lstrip("."))
    elif first != second:
        yield path, first, second


def check_comparable(results: Sequence[Result], allow: Sequence[str] = ()) -> None:
    """``ValueError`` if settings differ in anything but ``allow`` (names of settings or groups of them, or ``all``)."""
    if "all" in allow:
        return
    found = [
        f"  {setting}: {_short(mine)} in A, {_short(theirs)} in {label}"
        for label, result in zip(_labels(results)[1:], results[1:], strict=True)
        for setting, mine, theirs in differing(results[0]["settings"], result["settings"])
        if not any(setting == allowed or setting.startswith(f"{allowed}.") for allowed in allow)
    ]
    if found:
        raise ValueError(
            "these results were made under different settings, so their difference is not the models':\n"
            + "\n".join(found)
            + "\nevaluate again under one setting, or accept a difference with --allow NAME (--allow all for any)"
        )


def compare(baseline: Result, other: Result) -> list[Difference]:
    """Every metric that both results have. Errors: ``ValueError`` if there is none."""
    measures = measures_of(baseline)
    common = {name: measure for name, measure in measures.items() if measures_of(other).get(name) == measure}
    if not common:
        raise ValueError(f"no metric in common: {', '.join(measures)} and {', '.join(measures_of(other))}")
    before, after = evaluation_of(baseline), evaluation_of(other)
    return [_compare(name, measure, before, after) for name, measure in common.items()]


def _compare(name: str, measure: Measure, before: Evaluation, after: Evaluation) -> Difference:
    paired = after.paired(before)
    mine, theirs = before.measure(measure), after.measure(measure)
    return Difference(
        metric=name,
        baseline=mine,
        other=theirs,
        change=after.measured_change(before, measure) if paired else difference(theirs, mine),
        paired=paired,
    )


def report(names: Sequence[str], results: Sequence[Result], allow: Sequence[str] = ()) -> str:
    """What the command prints, for at least two results. Errors: ``ValueError`` if they are not comparable."""
    labels = _labels(results)
    check_comparable(results, allow)
    lines = [
        f"{label}  {_describe(result)}  {name}" for label, name, result in zip(labels, names, results, strict=True)
    ]
    for label, result in zip(labels[1:], results[1:], strict=True):
        differences = compare(results[0], result)
        how = "paired by prompt" if differences[0].paired else "NOT paired: other prompts or numbers of images"
        lines += ["", f"{label} - A, {how}", _row("", "A", label, f"{label} - A", f"{LEVEL:.0%} interval")]
        lines += [_line(d) for d in differences]
        lines += [f"  note: {note}" for note in _notes(results[0], label, result)]
    return "\n".join(lines)


def _labels(results: Sequence[Result]) -> list[str]:
    """A, B, ..., Z, AA, BB, ..."""
    return [chr(ord("A") + k % 26) * (1 + k // 26) for k in range(len(results))]


def _describe(result: Result) -> str:
    model = result["model"]
    policy = model["policy"]["class"].rpartition(".")[2]
    weights = f"{model['trained_weights'][:8]}{' averaged' if model['averaged'] else ''}"
    return f"{result['name']}: {policy}, iteration {model['iteration']}, weights {weights}"


def _line(found: Difference) -> str:
    change = f"{found.change.mean:+.4f}"
    return _row(found.metric, _estimate(found.baseline), _estimate(found.other), change, _interval(found.change))


def _row(name: str, *cells: str) -> str:
    return (f"  {name:<24}" + "".join(f"{cell:<20}" for cell in cells)).rstrip()


def _interval(change: Estimate) -> str:
    if math.isnan(change.stderr):
        return "(a single prompt)"
    if change.stderr == 0:  # an interval would say too much
        return "(the same for every prompt)"
    low, high = change.interval(LEVEL)
    return f"[{low:+.4f}, {high:+.4f}]"


def _estimate(value: Estimate) -> str:
    return f"{value.mean:.4f}" + ("" if math.isnan(value.stderr) else f" +- {value.stderr:.4f}")


def _notes(first: Result, label: str, second: Result) -> Iterator[str]:
    """Differences that were allowed, or that may move the last digits; the same weights under two names."""
    for group in ("settings", "versions", "device", "batch_size"):
        for what, mine, theirs in differing(first[group], second[group]):
            where = f"{group}.{what}".rstrip(".")
            yield f"{where} {_short(mine)} in A, {_short(theirs)} in {label}"
    if all(first["model"][part] == second["model"][part] for part in ("frozen_weights", "trained_weights")):
        yield "both are of the same weights"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def main(args: Sequence[str] | None = None) -> None:
    """The command. Unreadable files and refused comparisons exit with the reason and code 2."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m callbacks.compare", description="Compare evaluations, the first one with each."
    )
    parser.add_argument("results", nargs="+", help="result.json files, or folders that hold one; at least two")
    parser.add_argument("--allow", nargs="+", default=[], help="settings that may differ, or 'all'")
    options = parser.parse_args(args)
    try:
        if len(options.results) < 2:
            raise ValueError("give at least two results")
        results = [read_result(path) for path in options.results]
        print(report(options.results, results, options.allow))
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

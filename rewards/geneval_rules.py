"""GenEval's rules: is what a detector found what the prompt asked for? Pure functions, any detector, any vocabulary.

A prompt's metadata is one row of GenEval's prompt file::

    {"tag": ..., "prompt": ..., "include": [{"class", "count", "color"?, "position"?: [relation, i]}, ...],
     "exclude"?: [{"class", "count"}, ...]}

``position: ["left of", 0]`` means: left of the objects of the include clause number 0. The detections of one image map
a class to its objects, by falling score. With ``k`` the wanted and ``n`` the found number of objects of a clause:

``correct`` (Ghosh et al. 2023, GenEval, arXiv:2310.11513)
    Of each included class the ``k`` best objects exist, all have the colour, and all stand in the relation to all
    objects of the other clause; no excluded class reaches its count. Surplus objects do no harm unless excluded.
``strict_correct``
    The same with ``n == k`` in place of ``n >= k``.
``soft_score`` (the training reward of Flow-GRPO, Liu et al. 2025, arXiv:2505.05470; also used by DiffusionNFT and AWM)
    Mean over all terms of all include clauses; at most 1, reached exactly where all of them hold strictly; a clause
    with ``n > 2 k`` makes it negative. Each clause contributes

    =========================================  ==========================================================
    always                                     ``1 - |k - n| / k``
    ``n != k`` and a colour or position asked  ``0``
    ``n == k`` and a colour asked              ``1 - |k - n_color| / k``
    ``n == k``, colours right, position asked  ``1`` if it holds; ``0, 1`` (two terms) if a pair is wrong;
                                               ``0`` if the other clause failed
    =========================================  ==========================================================
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

RELATIONS = ("left of", "right of", "above", "below")

Box = Sequence[float]
"""``[x0, y0, x1, y1]`` in pixels, x to the right, y downwards."""


class Detection(TypedDict):
    """One detected object."""

    box: Box
    score: float
    """Confidence in [0, 1]."""
    color: str


Detections = Mapping[str, Sequence[Detection]]
"""class -> its objects, by falling score. A class without objects may be missing."""


@dataclass(frozen=True, kw_only=True)
class Clause:
    """``count`` objects of ``class_name``, optionally all of one colour and in one relation to an earlier clause."""

    class_name: str
    count: int
    color: str | None = None
    relation: str | None = None
    target: int = 0
    """Index of the include clause that ``relation`` refers to."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A prompt's metadata, checked."""

    include: tuple[Clause, ...]
    exclude: tuple[Clause, ...]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on one image."""

    correct: bool
    strict_correct: bool
    soft_score: float
    reason: str
    """Why ``correct`` is False, one line per unmet clause; empty where it is True."""


@dataclass(frozen=True, kw_only=True)
class _Problem:
    kind: Literal["count", "color", "target", "pair"]
    text: str


def judge(metadata: Mapping[str, Any], detections: Detections, position_threshold: float = 0.1) -> Judgement:
    """All verdicts on one image, ``position_threshold`` as in :func:`relations`. Malformed metadata: ``ValueError``."""
    wanted = parse(metadata)
    official = _check_included(wanted, _best(wanted, detections), position_threshold)
    strict = _check_included(wanted, _all(wanted, detections), position_threshold)
    surplus = _check_excluded(wanted, detections)
    lines = [problem.text for problem in official if problem is not None] + surplus
    return Judgement(
        correct=not lines,
        strict_correct=not surplus and all(problem is None for problem in strict),
        soft_score=_mean_term(wanted, _all(wanted, detections), strict),
        reason="\n".join(lines),
    )


def correct(metadata: Mapping[str, Any], detections: Detections, position_threshold: float = 0.1) -> bool:
    """GenEval's official verdict."""
    return judge(metadata, detections, position_threshold).correct


def strict_correct(metadata: Mapping[str, Any], detections: Detections, position_threshold: float = 0.1) -> bool:
    """As :func:`correct`, with exact counts."""
    return judge(metadata, detections, position_threshold).strict_correct


def soft_score(metadata: Mapping[str, Any], detections: Detections, position_threshold: float = 0.1) -> float:
    """Mean of the partial credits, <= 1, negative where far too many objects are found."""
    return judge(metadata, detections, position_threshold).soft_score


def relations(box: Box, other: Box, threshold: float = 0.1) -> set[str]:
    """Where ``box`` lies relative to ``other``: none, one or two of :data:`RELATIONS`.

    With ``o`` the offset of the centres and ``s`` the summed sizes of the boxes, per axis,
    ``d = sign(o) max(|o| - threshold s, 0) / ||o||_2``; a relation holds along an axis where ``|d| > 1/2``.
    Source: GenEval, arXiv:2310.11513, and its published evaluation (``threshold`` 0.1).
    """
    offset = [(box[i] + box[i + 2] - other[i] - other[i + 2]) / 2 for i in (0, 1)]
    size = [abs(box[i + 2] - box[i]) + abs(other[i + 2] - other[i]) for i in (0, 1)]
    clear = [max(abs(o) - threshold * s, 0.0) for o, s in zip(offset, size, strict=True)]
    if max(clear) < 1e-3:  # pixels: one on top of the other
        return set()
    norm = (offset[0] ** 2 + offset[1] ** 2) ** 0.5
    names = (("left of", "right of"), ("above", "below"))
    return {names[axis][offset[axis] > 0] for axis in (0, 1) if clear[axis] / norm > 0.5}


def parse(metadata: Mapping[str, Any]) -> Wanted:
    """Check one metadata row. ``ValueError`` names the offending key and the remedy."""
    include = metadata.get("include")
    if not isinstance(include, Sequence) or isinstance(include, str) or not include:
        raise ValueError(
            f"metadata['include'] is {include!r} (keys: {sorted(metadata)}): it must list at least one "
            '{"class": ..., "count": ...}; use prompts with GenEval metadata, or a reward that needs none'
        )
    exclude = metadata.get("exclude") or ()
    return Wanted(
        include=tuple(_clause(raw, f"metadata['include'][{i}]", position=i) for i, raw in enumerate(include)),
        exclude=tuple(_clause(raw, f"metadata['exclude'][{i}]", position=0) for i, raw in enumerate(exclude)),
    )


def _clause(raw: Any, where: str, position: int) -> Clause:
    fields = raw if isinstance(raw, Mapping) else {}
    name, count, color = fields.get("class"), fields.get("count"), fields.get("color")
    if not isinstance(name, str) or not name:
        raise ValueError(f"{where}['class'] is {name!r} in {raw!r}: expected the name of a class")
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        raise ValueError(f"{where}['count'] is {count!r}: expected a whole number >= 1")
    if color is not None and not isinstance(color, str):
        raise ValueError(f"{where}['color'] is {color!r}: expected the name of a colour, or no such key")
    if fields.get("position") is None:
        return Clause(class_name=name, count=count, color=color)
    relation, target = _position(fields["position"], f"{where}['position']", position)
    return Clause(class_name=name, count=count, color=color, relation=relation, target=target)


def _position(raw: Any, where: str, position: int) -> tuple[str, int]:
    match raw:
        case [str(relation), int(target)] if relation in RELATIONS and 0 <= target < position:
            return relation, target
    raise ValueError(f"{where} is {raw!r}: expected [one of {RELATIONS}, index of an earlier include clause]")


_Found = Sequence[Sequence[Detection]]  # one list of objects per include clause


def _all(wanted: Wanted, detections: Detections) -> _Found:
    return [detections.get(clause.class_name, ()) for clause in wanted.include]


def _best(wanted: Wanted, detections: Detections) -> _Found:
    return [objects[: clause.count] for clause, objects in zip(wanted.include, _all(wanted, detections), strict=True)]


def _check_included(wanted: Wanted, found: _Found, threshold: float) -> list[_Problem | None]:
    """The first problem of every include clause, in order: count, colour, position."""
    problems: list[_Problem | None] = []
    for clause, objects in zip(wanted.include, found, strict=True):
        problems.append(
            _count_problem(clause, objects)
            or _color_problem(clause, objects)
            or _position_problem(clause, objects, found, problems, threshold)
        )
    return problems


def _count_problem(clause: Clause, objects: Sequence[Detection]) -> _Problem | None:
    if len(objects) == clause.count:
        return None
    return _Problem(kind="count", text=f"wanted {clause.count} {clause.class_name}, found {len(objects)}")


def _color_problem(clause: Clause, objects: Sequence[Detection]) -> _Problem | None:
    if clause.color is None or _matching(clause, objects) == clause.count:
        return None
    colors = ", ".join(item["color"] for item in objects)
    return _Problem(kind="color", text=f"wanted {clause.count} {clause.color} {clause.class_name}, found {colors}")


def _position_problem(
    clause: Clause, objects: Sequence[Detection], found: _Found, earlier: Sequence[_Problem | None], threshold: float
) -> _Problem | None:
    if clause.relation is None:
        return None
    wanted = f"wanted {clause.class_name} {clause.relation} clause {clause.target}"
    if earlier[clause.target] is not None:
        return _Problem(kind="target", text=f"{wanted}, which itself failed")
    for item in objects:
        for other in found[clause.target]:
            actual = relations(item["box"], other["box"], threshold)
            if clause.relation not in actual:
                return _Problem(kind="pair", text=f"{wanted}, found {' and '.join(sorted(actual)) or 'no clear side'}")
    return None


def _check_excluded(wanted: Wanted, detections: Detections) -> list[str]:
    return [
        f"wanted fewer than {clause.count} {clause.class_name}, found {len(detections.get(clause.class_name, ()))}"
        for clause in wanted.exclude
        if len(detections.get(clause.class_name, ())) >= clause.count
    ]


def _mean_term(wanted: Wanted, found: _Found, problems: Sequence[_Problem | None]) -> float:
    clauses = zip(wanted.include, found, problems, strict=True)
    terms = [term for clause, objects, problem in clauses for term in _terms(clause, objects, problem)]
    return sum(terms) / len(terms)


def _terms(clause: Clause, objects: Sequence[Detection], problem: _Problem | None) -> list[float]:
    """The clause's partial credits, by the table of the module's docstring."""
    kind = problem.kind if problem else None
    terms = [1.0 - abs(clause.count - len(objects)) / clause.count]
    if kind == "count":
        asks_more = clause.color is not None or clause.relation is not None
        return [*terms, 0.0] if asks_more else terms
    if clause.color is not None:
        terms.append(1.0 - abs(clause.count - _matching(clause, objects)) / clause.count)
    if clause.relation is not None and kind != "color":
        terms += {None: [1.0], "target": [0.0], "pair": [0.0, 1.0]}[kind]
    return terms


def _matching(clause: Clause, objects: Sequence[Detection]) -> int:
    return sum(item["color"] == clause.color for item in objects)

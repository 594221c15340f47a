"""The world "shapes": coloured solid shapes on a plain ground, described by prompts in GenEval's six categories.

A prompt is a row of GenEval's metadata format (Ghosh et al. 2023, "GenEval: An Object-Focused Framework for Evaluating
Text-to-Image Alignment"): ``{"tag", "include": [{"class", "count", "color"?, "position"?}], "exclude"?, "prompt"}``,
where ``position = [relation, index]`` relates an object to entry ``index`` of ``include``.

Objects sit in the cells of a 4 x 4 lattice. Notation: ``x`` and columns run right, ``y`` and rows run down; in a shape's own
coordinates its cell is the square ``[-1, 1]^2``.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from lightning_modules.types import Metadata

SIZE = 32
"""Height and width of an image, pixels."""
SHAPES = ("circle", "square", "triangle", "cross", "ring")
COLORS = {
    "red": (0.90, 0.10, 0.10),
    "green": (0.10, 0.70, 0.20),
    "blue": (0.10, 0.25, 0.90),
    "yellow": (0.95, 0.85, 0.10),
    "purple": (0.60, 0.15, 0.75),
    "black": (0.05, 0.05, 0.05),
}
"""Name -> RGB in [0, 1]."""
BACKGROUND = (0.85, 0.85, 0.85)
"""RGB of the ground, in [0, 1]."""
TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
"""GenEval's categories."""
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
"""Relation -> the direction ``(x, y)`` in which the related object lies."""
COUNT_WORDS = {2: "two", 3: "three", 4: "four"}
MEDIA = ("photo", "picture", "image", "drawing", "sketch")
"""Each scene is asked for as "a <medium> of ...", so that even categories of few scenes have enough prompts."""
HELDOUT_PER_TAG = {
    "single_object": 10, "two_object": 11, "counting": 11, "colors": 10, "position": 11, "color_attr": 11,
}  # fmt: skip
"""64 held-out prompts in all."""
TRAIN_PER_TAG = 90
"""Upper bound of the training prompts of a category, so that no category outweighs the others."""

PROMPT_FOLDER = Path(__file__).parent / "shapes_prompts"
TRAIN_PROMPTS = PROMPT_FOLDER / "train_metadata.jsonl"
HELDOUT_PROMPTS = PROMPT_FOLDER / "heldout_metadata.jsonl"

CELL = 8
"""Side of an object and of the lattice cell that it fills, pixels. Objects never fill neighbouring cells, so a cell's width
at least lies between two of them. A small model that sees one cell as one patch can learn to draw in minutes."""
CELLS = SIZE // CELL
"""Cells per side."""
MAX_OBJECTS = 4
"""Objects of a scene, at most."""
RING_HOLE = 0.5
"""Inner over outer radius of a ring."""
CROSS_ARM = 1.0 / 3.0
"""Width of a cross's arms over its size."""
SUPERSAMPLING = 4
"""Sub-pixels per pixel and axis."""
_CANDIDATES = 256


# -- prompts ----------------------------------------------------------------------------------------------------------


def enumerate_prompts() -> list[Metadata]:
    """Every prompt of the world, category by category in the order of :data:`TAGS`, each text once."""
    return [_row(tag, medium, *scene) for tag in TAGS for medium in MEDIA for scene in _scenes(tag)]


def split_prompts() -> tuple[list[Metadata], list[Metadata]]:
    """``(train, heldout)`` prompts for RL: disjoint, deterministic, stratified over the categories.

    A category's prompts are ordered by the SHA-256 of their text; the first :data:`HELDOUT_PER_TAG` are held out and
    the next :data:`TRAIN_PER_TAG` are for training.
    """
    train: list[Metadata] = []
    heldout: list[Metadata] = []
    for tag, held in HELDOUT_PER_TAG.items():
        rows = sorted((row for row in enumerate_prompts() if row["tag"] == tag), key=_digest)
        heldout += rows[:held]
        train += rows[held : held + TRAIN_PER_TAG]
    return train, heldout


def pretraining_prompts() -> dict[str, list[Metadata]]:
    """Category -> all its prompts but the held-out ones."""
    held = {row["prompt"] for row in split_prompts()[1]}
    rows = [row for row in enumerate_prompts() if row["prompt"] not in held]
    return {tag: [row for row in rows if row["tag"] == tag] for tag in TAGS}


def write_prompts(path: str | Path, rows: Iterable[Metadata]) -> None:
    """Write ``rows`` as GenEval does: one JSON object a line, UTF-8."""
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _scenes(tag: str) -> list[tuple[list[Metadata], list[Metadata], str]]:
    """``(include, exclude, words after "a <medium> of ")`` of every scene of a category."""
    pairs = list(itertools.permutations(SHAPES, 2))
    match tag:
        case "single_object":
            return [([_one(s)], [], f"a {s}") for s in SHAPES]
        case "two_object":
            return [([_one(a), _one(b)], [], f"a {a} and a {b}") for a, b in pairs]
        case "counting":
            return [
                ([{"class": s, "count": n}], [{"class": s, "count": n + 1}], f"{word} {_plural(s)}")
                for n, word in COUNT_WORDS.items()
                for s in SHAPES
            ]
        case "colors":
            return [([_one(s, c)], [], f"a {c} {s}") for c in COLORS for s in SHAPES]
        case "position":
            return [
                ([_one(a), _one(b) | {"position": [relation, 0]}], [], f"a {b} {relation} a {a}")
                for a, b in pairs
                for relation in RELATIONS
            ]
        case "color_attr":
            return [
                ([_one(a, c), _one(b, d)], [], f"a {c} {a} and a {d} {b}")
                for a, b in pairs
                for c, d in itertools.permutations(COLORS, 2)
            ]
    raise ValueError(f"unknown tag {tag!r}: choose one of {TAGS}")


def _row(tag: str, medium: str, include: list[Metadata], exclude: list[Metadata], words: str) -> Metadata:
    excluded = {"exclude": exclude} if exclude else {}
    article = "an" if medium[0] in "aeiou" else "a"
    return {"tag": tag, "include": include, **excluded, "prompt": f"{article} {medium} of {words}"}


def _one(shape: str, color: str | None = None) -> Metadata:
    return {"class": shape, "count": 1} | ({"color": color} if color else {})


def _plural(shape: str) -> str:
    return shape + ("es" if shape.endswith("s") else "s")


def _digest(row: Metadata) -> str:
    return hashlib.sha256(row["prompt"].encode()).hexdigest()


# -- scenes -----------------------------------------------------------------------------------------------------------


def render(metadata: Metadata, generator: torch.Generator) -> Tensor:
    """Draw a random scene that satisfies a prompt exactly: the included objects, no others, none overlapping.

    Places and the colours that the prompt leaves open are random; related objects lie apart along the relation's axis, and
    further apart along it than across it.

    Args:
        metadata: a row in GenEval's format whose classes and colours are of this world.
        generator: source of all randomness (CPU).

    Returns:
        ``[3, SIZE, SIZE]`` float32 in [0, 1], antialiased.

    Raises:
        ValueError: on a class, colour, relation or number of objects that the world does not know.
    """
    objects = [entry for entry in metadata["include"] for _ in range(entry["count"])]
    _check(objects)
    cells = _layout(len(objects), _relations(metadata["include"]), generator)
    image = torch.tensor(BACKGROUND).view(3, 1, 1).repeat(1, SIZE, SIZE)
    for entry, (column, row) in zip(objects, cells.tolist(), strict=True):
        color = torch.tensor(COLORS[entry.get("color") or _random_color(generator)]).view(3, 1, 1)
        cell = image[:, row * CELL : (row + 1) * CELL, column * CELL : (column + 1) * CELL]
        cell.lerp_(color.expand_as(cell), coverage(entry["class"]))
    return image


@functools.cache
def coverage(shape: str) -> Tensor:
    """Share of each of its cell's pixels that a shape covers: ``[CELL, CELL]`` float32 in [0, 1]."""
    places = (torch.arange(CELL * SUPERSAMPLING) + 0.5) / (CELL * SUPERSAMPLING) * 2 - 1
    inside = _inside(shape, *torch.broadcast_tensors(places, places[:, None])).float()
    return inside.view(CELL, SUPERSAMPLING, CELL, SUPERSAMPLING).mean(dim=(1, 3))


def _inside(shape: str, u: Tensor, v: Tensor) -> Tensor:
    """Whether points of the cell ``[-1, 1]^2`` (u right, v down) belong to the shape."""
    match shape:
        case "circle":
            return u.square() + v.square() <= 1
        case "square":
            return torch.maximum(u.abs(), v.abs()) <= 1
        case "triangle":
            return (2 * u.abs() <= v + 1) & (v <= 1)
        case "cross":
            return (torch.minimum(u.abs(), v.abs()) <= CROSS_ARM) & (torch.maximum(u.abs(), v.abs()) <= 1)
        case "ring":
            radius = u.square() + v.square()
            return (radius <= 1) & (radius >= RING_HOLE**2)
    raise ValueError(f"unknown shape {shape!r}: choose one of {SHAPES}")


def _layout(count: int, relations: list[tuple[int, int, str]], generator: torch.Generator) -> Tensor:
    """Random cells ``[count, 2]`` = (column, row): many candidates at a time, the first valid one is taken."""
    while True:
        cells = torch.randint(CELLS, (_CANDIDATES, count, 2), generator=generator)
        valid = _valid(cells, relations)
        if valid.any():
            return cells[int(valid.nonzero()[0])]


def _valid(cells: Tensor, relations: list[tuple[int, int, str]]) -> Tensor:
    """``[K]`` bool: which of K candidates keep all objects apart and all relations."""
    valid = torch.ones(len(cells), dtype=torch.bool)
    for a, b in itertools.combinations(range(cells.shape[1]), 2):
        valid &= (cells[:, a] - cells[:, b]).abs().amax(-1) >= 2
    for subject, anchor, relation in relations:
        offset = cells[:, subject] - cells[:, anchor]
        along = offset @ torch.tensor(RELATIONS[relation])
        across = offset.abs().sum(-1) - along.abs()
        valid &= (along >= 2) & (along > across)
    return valid


def _relations(include: list[Metadata]) -> list[tuple[int, int, str]]:
    """``(subject, anchor, relation)``, both as indices among the objects (an entry's first object stands for it)."""
    first = list(itertools.accumulate((entry["count"] for entry in include), initial=0))
    return [
        (first[i], first[entry["position"][1]], entry["position"][0])
        for i, entry in enumerate(include)
        if "position" in entry
    ]


def _random_color(generator: torch.Generator) -> str:
    return list(COLORS)[int(torch.randint(len(COLORS), (), generator=generator))]


def _check(objects: list[Metadata]) -> None:
    if not 1 <= len(objects) <= MAX_OBJECTS:
        raise ValueError(f"{len(objects)} objects in a scene: the world holds 1 to {MAX_OBJECTS}")
    for entry in objects:
        if entry["class"] not in SHAPES:
            raise ValueError(f"unknown shape {entry['class']!r}: choose one of {SHAPES}")
        if entry.get("color") is not None and entry["color"] not in COLORS:
            raise ValueError(f"unknown color {entry['color']!r}: choose one of {tuple(COLORS)}")
        if "position" in entry and entry["position"][0] not in RELATIONS:
            raise ValueError(f"unknown relation {entry['position'][0]!r}: choose one of {tuple(RELATIONS)}")

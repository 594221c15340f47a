"""Training prompts of our own in GenEval's form: objects, counts, colours and positions, mixed by weights.

``python -m datamodules.geneval_prompts --to data/train_metadata.jsonl --count 50000 --exclude data/geneval_metadata.jsonl``

The kinds of prompts, their wording and metadata are those of the public generator of GenEval's evaluation prompts
(djghosh13/geneval, ``prompts/create_prompts.py``; Ghosh et al. 2023, arXiv:2310.11513), so that its judge applies and the
training prompts look like the tested ones, plurals such as "sheeps" included:

=================  ============================================  ===================================
kind               prompt                                        drawn
=================  ============================================  ===================================
``single_object``  a photo of a {A}                              one of 80 classes
``two_object``     a photo of a {A} and a {B}                    two classes
``counting``       a photo of {two, three, four} {A}s            a class, a count
``colors``         a photo of a {colour} {A}                     a class but person, of 10 colours
``position``       a photo of a {A} {relation} a {B}             two classes, of 4 relations
``color_attr``     a photo of a {colour} {A} and a {colour} {B}  two classes but person, two colours
=================  ============================================  ===================================

Prompts are drawn independently, with repetition: the small kinds (240 counting prompts exist) keep their weight. A prompt
is drawn again if an excluded one has its words or its meaning: "a cat left of a dog" and "a dog right of a cat" ask for
one image, as do "a cat and a dog" and "a dog and a cat". The same arguments write the same file.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datamodules.prompts import load_prompts
from datamodules.write_file import write_file

CLASSES = tuple(
    """person, bicycle, car, motorcycle, airplane, bus, train, truck, boat, traffic light, fire hydrant, stop sign, parking
    meter, bench, bird, cat, dog, horse, sheep, cow, elephant, bear, zebra, giraffe, backpack, umbrella, handbag, tie,
    suitcase, frisbee, skis, snowboard, sports ball, kite, baseball bat, baseball glove, skateboard, surfboard, tennis racket,
    bottle, wine glass, cup, fork, knife, spoon, bowl, banana, apple, sandwich, orange, broccoli, carrot, hot dog, pizza,
    donut, cake, chair, couch, potted plant, bed, dining table, toilet, tv, laptop, computer mouse, tv remote, computer
    keyboard, cell phone, microwave, oven, toaster, sink, refrigerator, book, clock, vase, scissors, teddy bear, hair drier,
    toothbrush""".replace("\n    ", " ").split(", ")
)
"""COCO's 80 classes by index, under GenEval's names."""
COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
COUNTS = {2: "two", 3: "three", 4: "four"}
MIRRORED = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
"""Relation -> the same one seen from the other object."""

_COLORED = tuple(name for name in CLASSES if name != "person")
_TRIES = 1000  # draws of one prompt before its kind counts as excluded altogether

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Mix:
    """Relative weights of the kinds. The default is the mix of Flow-GRPO's training prompts (Liu et al. 2025, arXiv:2505.05470;
    public repository yifan123/flow_grpo)."""

    position: float = 7.0
    counting: float = 5.0
    color_attr: float = 3.0
    colors: float = 1.0
    two_object: float = 1.0
    single_object: float = 0.0
    """GenEval tests all 80 single objects: without them, none are left to train on."""

    def __post_init__(self) -> None:
        weights = asdict(self)
        if not all(0 <= weight < float("inf") for weight in weights.values()) or not any(weights.values()):
            raise ValueError(f"mix {weights}: give each kind a weight of at least 0, and one of them more")


def generate(
    count: int, *, seed: int = 0, mix: Mix | None = None, exclude: Collection[Mapping[str, Any]] = ()
) -> list[Row]:
    """``count`` prompts with GenEval metadata, as a function of the arguments alone.

    Args:
        count: at least 1.
        seed: of the draws.
        mix: weights of the kinds.
        exclude: rows whose ``prompt``, or meaning if they have an ``include``, must not occur.

    Errors: ``ValueError`` if ``count`` is below 1, a kind has no prompt left, or an ``include`` is not of GenEval's form.
    """
    if count < 1:
        raise ValueError(f"count={count}: give at least 1")
    weights = asdict(mix or Mix())
    banned = {key for row in exclude for key in _keys(row)}
    rng = random.Random(seed)
    kinds = rng.choices(list(weights), list(weights.values()), k=count)
    return [_draw(kind, rng, banned) for kind in kinds]


def _draw(kind: str, rng: random.Random, banned: set[Any]) -> Row:
    for _ in range(_TRIES):
        row = {"tag": kind, **_KINDS[kind](rng)}
        if banned.isdisjoint(_keys(row)):
            return row
    raise ValueError(
        f"no prompt of the kind {kind!r} is left outside the excluded ones (tried {_TRIES}): set its weight to 0 "
        f"(--mix.{kind} 0), or exclude fewer"
    )


def _keys(row: Mapping[str, Any]) -> set[Any]:
    """What two prompts have in common if they are the same: the words, or the meaning."""
    keys: set[Any] = {" ".join(row["prompt"].casefold().split())}
    if row.get("include"):
        try:
            keys.add(meaning(row["include"]))
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"prompt {row['prompt']!r} is to be excluded, but its include {row['include']!r} is not of GenEval's form "
                f"({type(error).__name__}: {error}): correct it, or leave `include` out to exclude the words alone"
            ) from error
    return keys


def meaning(include: Sequence[Mapping[str, Any]]) -> tuple[Any, ...]:
    """What include clauses ask for, whatever their order and whichever object is named first: the objects, and the
    relations, each read from left to right or from top to bottom."""
    objects = sorted((clause["class"], clause["count"], clause.get("color") or "") for clause in include)
    relations = []
    for clause in include:
        if clause.get("position"):
            relation, index = clause["position"]
            first, second = clause["class"], include[index]["class"]
            if relation in ("right of", "below"):
                relation, first, second = MIRRORED[relation], second, first
            relations.append((relation, first, second))
    return tuple(objects), tuple(sorted(relations))


def _single_object(rng: random.Random) -> Row:
    name = rng.choice(CLASSES)
    return {"include": [{"class": name, "count": 1}], "prompt": f"a photo of {_article(name)}"}


def _two_object(rng: random.Random) -> Row:
    first, second = rng.sample(CLASSES, 2)
    include = [{"class": first, "count": 1}, {"class": second, "count": 1}]
    return {"include": include, "prompt": f"a photo of {_article(first)} and {_article(second)}"}


def _counting(rng: random.Random) -> Row:
    name, number = rng.choice(CLASSES), rng.choice(list(COUNTS))
    plural = name + ("es" if name.endswith("s") else "s")
    return {
        "include": [{"class": name, "count": number}],
        "exclude": [{"class": name, "count": number + 1}],
        "prompt": f"a photo of {COUNTS[number]} {plural}",
    }


def _colors(rng: random.Random) -> Row:
    name, color = rng.choice(_COLORED), rng.choice(COLORS)
    return {"include": [{"class": name, "count": 1, "color": color}], "prompt": f"a photo of {_article(color)} {name}"}


def _position(rng: random.Random) -> Row:
    first, second = rng.sample(CLASSES, 2)
    relation = rng.choice(list(MIRRORED))
    include = [{"class": second, "count": 1}, {"class": first, "count": 1, "position": [relation, 0]}]
    return {"include": include, "prompt": f"a photo of {_article(first)} {relation} {_article(second)}"}


def _color_attr(rng: random.Random) -> Row:
    names, colors = rng.sample(_COLORED, 2), rng.sample(COLORS, 2)
    include = [{"class": name, "count": 1, "color": color} for name, color in zip(names, colors, strict=True)]
    described = [f"{_article(color)} {name}" for name, color in zip(names, colors, strict=True)]
    return {"include": include, "prompt": f"a photo of {' and '.join(described)}"}


_KINDS: dict[str, Callable[[random.Random], Row]] = {
    "single_object": _single_object,
    "two_object": _two_object,
    "counting": _counting,
    "colors": _colors,
    "position": _position,
    "color_attr": _color_attr,
}


def _article(words: str) -> str:
    return f"{'an' if words[0] in 'aeiou' else 'a'} {words}"


def main(args: Sequence[str] | None = None) -> Path:
    """The command; returns the file it wrote. Unusable arguments and files exit with the reason and code 2."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(prog="python -m datamodules.geneval_prompts", description="Write training prompts.")
    parser.add_argument("--to", type=Path, required=True, help="file to write, .jsonl")
    parser.add_argument("--count", type=int, default=50_000, help="number of prompts")
    parser.add_argument("--seed", type=int, default=0, help="of the draws")
    parser.add_argument("--mix", type=Mix, default=Mix(), help="relative weights of the kinds")
    parser.add_argument("--exclude", nargs="*", default=[], help="prompt files (.txt or .jsonl) of test prompts")
    options = parser.parse_args(args)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.49
    try:
        mix = instantiate(options)["mix"]
        if options.to.suffix != ".jsonl":
            raise ValueError(f"--to {options.to}: the prompts carry metadata, name a .jsonl file")
        banned = [prompt.metadata for file in options.exclude for prompt in load_prompts(file)]
        rows = generate(options.count, seed=options.seed, mix=mix, exclude=banned)
        write_file(options.to, b"".join(json.dumps(row).encode() + b"\n" for row in rows))
    except ValueError as error:
        parser.error(str(error))
    kinds = ", ".join(f"{kind} {number}" for kind, number in Counter(row["tag"] for row in rows).most_common())
    different = len({row["prompt"] for row in rows})
    print(
        f"{len(rows)} prompts ({different} different; {kinds}) without {len(banned)} excluded ones, written to {options.to}"
    )
    return options.to


if __name__ == "__main__":
    main()

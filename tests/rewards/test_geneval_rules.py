import json
import random
from pathlib import Path

import pytest

from rewards.geneval_rules import RELATIONS, correct, judge, parse, relations, soft_score, strict_correct

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "geneval_rules.json").read_text())

LEFT, RIGHT, TOP = (0, 40, 20, 60), (80, 40, 100, 60), (0, 0, 20, 20)


def found(*objects):
    """(color, box) pairs -> detections by falling score."""
    return [{"box": list(box), "score": 0.9 - 0.1 * i, "color": color} for i, (color, box) in enumerate(objects)]


def clause(name="cat", count=1, **more):
    return {"class": name, "count": count, **more}


@pytest.mark.parametrize("case", GOLDEN, ids=lambda case: case["metadata"]["prompt"])
def test_golden_cases(case):
    verdict = judge(case["metadata"], case["detections"])
    assert verdict.correct is case["correct"]
    assert verdict.strict_correct is case["strict_correct"]
    assert verdict.soft_score == pytest.approx(case["soft_score"], abs=1e-12)
    assert bool(verdict.reason) is not verdict.correct


# -- the soft score's table, worked by hand -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("include", "detections", "expected"),
    [
        ([clause(count=4)], {"cat": found(*[("red", LEFT)] * 3)}, 3 / 4),
        ([clause(count=2)], {"cat": found(*[("red", LEFT)] * 5)}, 1 - 3 / 2),  # far too many: negative
        ([clause(color="red")], {}, 0.0),
        ([clause(color="red")], {"cat": found(("blue", LEFT))}, (1 + 0) / 2),
        ([clause(count=2, color="red")], {"cat": found(("red", LEFT), ("blue", RIGHT))}, (1 + 1 / 2) / 2),
        ([clause(count=2, color="red")], {"cat": found(("red", LEFT))}, (1 / 2 + 0) / 2),
        (  # the relation holds
            [clause(), clause("dog", position=["right of", 0])],
            {"cat": found(("red", LEFT)), "dog": found(("red", RIGHT))},
            1.0,
        ),
        (  # a wrong pair contributes 0 and 1
            [clause(), clause("dog", position=["left of", 0])],
            {"cat": found(("red", LEFT)), "dog": found(("red", RIGHT))},
            (1 + 1 + 0 + 1) / 4,
        ),
        (  # the other clause failed
            [clause(), clause("dog", position=["right of", 0])],
            {"dog": found(("red", RIGHT))},
            (0 + 1 + 0) / 3,
        ),
        (  # wrong colour: the position is not looked at
            [clause(), clause("dog", color="blue", position=["right of", 0])],
            {"cat": found(("red", LEFT)), "dog": found(("red", RIGHT))},
            (1 + 1 + 0) / 3,
        ),
        (  # the clause's own count is wrong: one 0 for colour and position together
            [clause(), clause("dog", color="red", position=["right of", 0])],
            {"cat": found(("red", LEFT))},
            (1 + 0 + 0) / 3,
        ),
    ],
)
def test_soft_score_by_hand(include, detections, expected):
    assert soft_score({"include": include}, detections) == pytest.approx(expected)


def test_official_rule_forgives_surplus_and_strict_does_not():
    metadata = {"include": [clause(color="red")]}
    best_is_red = {"cat": found(("red", LEFT), ("blue", RIGHT))}
    assert correct(metadata, best_is_red)
    assert not strict_correct(metadata, best_is_red)
    best_is_blue = {"cat": found(("blue", RIGHT), ("red", LEFT))}
    assert not correct(metadata, best_is_blue)


def test_excluded_surplus_fails_both_rules_and_is_named():
    metadata = {"include": [clause(count=2)], "exclude": [clause(count=3)]}
    verdict = judge(metadata, {"cat": found(*[("red", LEFT)] * 3)})
    assert (verdict.correct, verdict.strict_correct) == (False, False)
    assert verdict.reason == "wanted fewer than 3 cat, found 3"


def test_all_pairs_must_stand_in_the_relation():
    metadata = {"include": [clause(count=2), clause("dog", position=["right of", 0])]}
    dog = found(("red", RIGHT))
    assert correct(metadata, {"cat": found(("red", LEFT), ("red", TOP)), "dog": dog})
    verdict = judge(metadata, {"cat": found(("red", LEFT), ("red", RIGHT)), "dog": dog})
    assert not verdict.correct
    assert "right of" in verdict.reason


# -- relations ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("box", "other", "expected"),
    [
        (LEFT, RIGHT, {"left of"}),
        (RIGHT, LEFT, {"right of"}),
        (TOP, LEFT, {"above"}),
        (LEFT, TOP, {"below"}),
        ((0, 0, 10, 10), (50, 50, 60, 60), {"left of", "above"}),  # offset (-50, -50), clear 48, 48 / 70.7 = 0.68
        (LEFT, LEFT, set()),
        ((0, 0, 20, 20), (4, 0, 24, 20), set()),  # offset 4 = 0.1 (20 + 20): exactly not clear
        ((0, 0, 20, 20), (8, 0, 28, 20), set()),  # clear 4 of 8: exactly one half is not enough
        ((0, 0, 20, 20), (9, 0, 29, 20), {"left of"}),  # clear 5 of 9
    ],
)
def test_relations_by_hand(box, other, expected):
    assert relations(box, other) == expected


def test_threshold_widens_the_grey_zone():
    assert relations((0, 0, 20, 20), (9, 0, 29, 20), threshold=0.0) == {"left of"}
    assert relations((0, 0, 20, 20), (9, 0, 29, 20), threshold=0.2) == set()
    metadata = {"include": [clause(), clause("dog", position=["right of", 0])]}
    detections = {"cat": found(("red", (0, 0, 20, 20))), "dog": found(("red", (9, 0, 29, 20)))}
    assert correct(metadata, detections)
    assert not correct(metadata, detections, position_threshold=0.2)


def test_relations_are_antisymmetric():
    rng = random.Random(0)
    opposite = dict(zip(RELATIONS, ("right of", "left of", "below", "above"), strict=True))
    for _ in range(200):
        a, b = ([x, y, x + rng.uniform(1, 99), y + rng.uniform(1, 99)] for x, y in [_point(rng), _point(rng)])
        assert relations(b, a) == {opposite[name] for name in relations(a, b)}


def _point(rng):
    return rng.uniform(0, 400), rng.uniform(0, 400)


# -- properties of the verdicts -------------------------------------------------------------------------------------


def test_strict_implies_correct_and_equals_a_full_soft_score():
    rng = random.Random(0)
    seen = set()
    for _ in range(500):
        relation = {"position": [rng.choice(RELATIONS), 0]} if rng.random() < 0.5 else {}
        color = {"color": rng.choice(("red", "blue"))} if rng.random() < 0.5 else {}
        metadata = {"include": [clause(count=rng.randint(1, 2)), clause("dog", **color, **relation)]}
        detections = {
            name: found(
                *[(rng.choice(("red", "blue")), rng.choice((LEFT, RIGHT, TOP))) for _ in range(rng.randint(0, 2))]
            )
            for name in ("cat", "dog")
        }
        verdict = judge(metadata, detections)
        assert verdict.correct or not verdict.strict_correct
        assert verdict.strict_correct is (verdict.soft_score == 1.0)
        assert verdict.soft_score <= 1.0
        seen.add((verdict.correct, verdict.strict_correct))
    assert seen == {(True, True), (True, False), (False, False)}


# -- malformed metadata ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"prompt": "a cat"}, r"\['include'\] is None.*use prompts with GenEval metadata"),
        ({"include": []}, r"\['include'\] is \[\]"),
        ({"include": "cat"}, r"\['include'\] is 'cat'"),
        ({"include": ["cat"]}, r"\['include'\]\[0\]\['class'\]"),
        ({"include": [{"count": 1}]}, r"\['include'\]\[0\]\['class'\] is None"),
        ({"include": [{"class": "cat"}]}, r"\['include'\]\[0\]\['count'\] is None"),
        ({"include": [clause(count=0)]}, r"\['count'\] is 0"),
        ({"include": [clause(count=1.5)]}, r"\['count'\] is 1.5"),
        ({"include": [clause(color=3)]}, r"\['color'\] is 3"),
        ({"include": [clause(position=["left of", 0])]}, r"\['position'\] is \['left of', 0\]"),  # itself
        ({"include": [clause(), clause("dog", position=["near", 0])]}, r"\['include'\]\[1\]\['position'\]"),
        ({"include": [clause(), clause("dog", position="left of")]}, r"\['include'\]\[1\]\['position'\]"),
        ({"include": [clause(), clause("dog", position=["above", -1])]}, r"\['include'\]\[1\]\['position'\]"),
        ({"include": [clause()], "exclude": [{"class": "cat"}]}, r"\['exclude'\]\[0\]\['count'\] is None"),
    ],
)
def test_malformed_metadata_names_the_key(metadata, message):
    with pytest.raises(ValueError, match=message):
        judge(metadata, {})


def test_parse_keeps_every_field():
    wanted = parse({"include": [clause(), clause("dog", 2, color="red", position=["above", 0])]})
    second = wanted.include[1]
    assert (second.class_name, second.count, second.color) == ("dog", 2, "red")
    assert (second.relation, second.target) == ("above", 0)
    assert wanted.exclude == ()

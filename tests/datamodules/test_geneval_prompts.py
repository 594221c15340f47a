import hashlib
import json
from collections import Counter
from dataclasses import asdict

import pytest

from datamodules.geneval_prompts import CLASSES, COLORS, MIRRORED, Mix, generate, main, meaning
from datamodules.prompts import load_prompts
from rewards.geneval_rules import judge, parse, relations

KINDS = tuple(asdict(Mix()))


def only(kind):
    return Mix(**{name: float(name == kind) for name in KINDS})


def box(x, y):
    return {"box": [x, y, x + 10, y + 10], "score": 0.9, "color": "?"}


def draw(include):
    """Detections of a perfect image of one or two include clauses."""
    places = {"left of": (-40, 0), "right of": (40, 0), "above": (0, -40), "below": (0, 40)}
    found = {}
    for index, clause in enumerate(include):
        x, y = (100, 100) if index == 0 else (160, 160)
        if "position" in clause:
            dx, dy = places[clause["position"][0]]
            x, y = 100 + dx, 100 + dy
        found[clause["class"]] = [
            {**box(x + 20 * i, y), "color": clause.get("color", "?")} for i in range(clause["count"])
        ]
    return found


def test_the_classes_are_cocos():
    assert len(CLASSES) == len(set(CLASSES)) == 80
    assert CLASSES[:3] == ("person", "bicycle", "car") and CLASSES[-2:] == ("hair drier", "toothbrush")
    assert {CLASSES[64], CLASSES[65], CLASSES[66]} == {"computer mouse", "tv remote", "computer keyboard"}
    assert all(name == " ".join(name.split()) for name in CLASSES)


@pytest.mark.parametrize("kind", KINDS)
def test_every_prompt_is_judged_correct_where_its_objects_are(kind):
    for row in generate(100, seed=1, mix=only(kind)):
        parse(row)
        verdict = judge(row, draw(row["include"]))
        assert verdict.correct and verdict.strict_correct and verdict.soft_score == 1.0, (row, verdict)
        assert not judge(row, {}).correct


@pytest.mark.parametrize(
    ("kind", "seen"),
    [
        ("single_object", {"a photo of an umbrella", "a photo of a bench"}),
        ("colors", {"a photo of an orange kite", "a photo of a red umbrella"}),
        ("counting", {"a photo of three skises", "a photo of two sheeps", "a photo of four buses"}),
    ],
)
def test_the_wording_is_genevals(kind, seen):
    assert seen <= {row["prompt"] for row in generate(20_000, mix=only(kind))}


def test_positions_name_the_placed_object_first():
    row = generate(1, mix=only("position"))[0]
    second, first = row["include"]
    relation, index = first["position"]
    article = {True: "an", False: "a"}
    phrases = [f"{article[c['class'][0] in 'aeiou']} {c['class']}" for c in (first, second)]
    assert row["prompt"] == f"a photo of {phrases[0]} {relation} {phrases[1]}" and index == 0


def test_people_have_no_colour_and_pairs_differ():
    for row in generate(3000, mix=Mix(color_attr=1, colors=1, two_object=1, position=1, counting=0)):
        names = [clause["class"] for clause in row["include"]]
        colors = [clause["color"] for clause in row["include"] if "color" in clause]
        assert len(set(names)) == len(names) and len(set(colors)) == len(colors)
        assert not (colors and "person" in names) and set(colors) <= set(COLORS)


def test_the_mix_is_kept():
    mix = Mix(position=4, counting=3, color_attr=2, colors=1, two_object=0, single_object=0)
    kinds = Counter(row["tag"] for row in generate(10_000, mix=mix))
    assert "two_object" not in kinds
    for kind, weight in asdict(mix).items():  # five standard deviations of a binomial share
        assert kinds[kind] / 10_000 == pytest.approx(weight / 10, abs=5 * 0.005)


def test_the_seed_decides():
    digest = hashlib.sha256("".join(row["prompt"] for row in generate(500, seed=3)).encode()).hexdigest()
    assert digest == "1b9fbab9baf38f627666f1402fbc49443f6af2f193dc42b414f85bb0ecce07a6"
    assert generate(500, seed=3) == generate(500, seed=3) != generate(500, seed=4)


def test_mirrored_relations_agree_with_the_judges():
    left, right = [0, 0, 10, 10], [40, 0, 50, 10]
    above, below = [0, 0, 10, 10], [0, 40, 10, 50]
    for one, other in ((left, right), (right, left), (above, below), (below, above)):
        (relation,) = relations(one, other)
        assert relations(other, one) == {MIRRORED[relation]}


def test_meaning_by_hand():
    cat, dog = {"class": "cat", "count": 1}, {"class": "dog", "count": 1}
    assert meaning([cat, dog]) == meaning([dog, cat])
    assert meaning([cat, {**dog, "count": 2}]) != meaning([cat, dog])
    assert meaning([dog, {**cat, "position": ["left of", 0]}]) == meaning([cat, {**dog, "position": ["right of", 0]}])
    assert meaning([dog, {**cat, "position": ["above", 0]}]) == meaning([cat, {**dog, "position": ["below", 0]}])
    assert meaning([dog, {**cat, "position": ["left of", 0]}]) != meaning([cat, {**dog, "position": ["left of", 0]}])
    assert meaning([dog, {**cat, "position": ["left of", 0]}]) != meaning([cat, dog])
    red_cat, blue_dog = {**cat, "color": "red"}, {**dog, "color": "blue"}
    assert meaning([red_cat, blue_dog]) == meaning([blue_dog, red_cat])
    assert meaning([red_cat, blue_dog]) != meaning([{**cat, "color": "blue"}, {**dog, "color": "red"}])


def test_excluded_prompts_do_not_occur_in_words_or_meaning():
    mix = Mix(position=1, counting=1, color_attr=0, colors=1, two_object=1)
    free = generate(20_000, mix=mix)
    test_set = free[:200]
    kept = generate(20_000, mix=mix, exclude=test_set)
    for key in (lambda row: row["prompt"], lambda row: meaning(row["include"])):
        banned = {key(row) for row in test_set}
        assert banned & {key(row) for row in free[200:]}  # they would occur
        assert not banned & {key(row) for row in kept}
    words_alone = [{"prompt": f"A photo of {number}  CATS"} for number in ("two", "three")]
    left = {row["prompt"] for row in generate(5000, mix=only("counting"), exclude=words_alone)}
    assert "a photo of four cats" in left and not left & {"a photo of two cats", "a photo of three cats"}


def test_a_kind_that_is_excluded_altogether_is_an_error():
    every = [{"prompt": row["prompt"]} for row in generate(5000, mix=only("single_object"))]
    with pytest.raises(ValueError, match=r"'single_object' is left .*--mix.single_object 0"):
        generate(10, mix=only("single_object"), exclude=every)


@pytest.mark.parametrize("weights", [{"position": -1.0}, {"position": float("nan")}, dict.fromkeys(KINDS, 0.0)])
def test_bad_weights(weights):
    with pytest.raises(ValueError, match="give each kind a weight of at least 0"):
        Mix(**weights)


@pytest.mark.parametrize(
    "include",
    [
        "cat", 7, [7], [{"class": "cat"}], [{"class": ["cat"], "count": 1}, {"class": "dog", "count": 1}],
        [{"class": "cat", "count": 1, "position": "left of"}], [{"class": "cat", "count": 1, "position": ["above", 7]}],
    ],
)  # fmt: skip
def test_an_excluded_row_of_another_form_says_so(include):
    with pytest.raises(ValueError, match="prompt 'a' is to be excluded, but its include .* is not of GenEval's form"):
        generate(3, exclude=[{"prompt": "a", "include": include}])


def test_bad_count():
    with pytest.raises(ValueError, match="count=0"):
        generate(0)


@pytest.mark.filterwarnings("ignore:.*repeat an earlier one")
def test_the_command(tmp_path, capsys):
    excluded = tmp_path / "test.jsonl"
    excluded.write_text("".join(json.dumps(row) + "\n" for row in generate(30, seed=9)))
    other = tmp_path / "more.txt"
    other.write_text("a photo of two cats\n")
    file = tmp_path / "train_metadata.jsonl"
    args = ["--to", str(file), "--count", "200", "--seed", "5", "--mix.position", "0", "--mix.two_object", "3"]
    assert main([*args, "--exclude", str(excluded), str(other)]) == file
    printed = capsys.readouterr().out
    assert "200 prompts" in printed and "without 31 excluded ones" in printed
    rows = [prompt.metadata for prompt in load_prompts(file)]
    banned = [prompt.metadata for name in (excluded, other) for prompt in load_prompts(name)]
    assert rows == generate(200, seed=5, mix=Mix(position=0, two_object=3), exclude=banned)


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        (["--to", "a.txt"], "name a .jsonl file"),
        (["--to", "a.jsonl", "--count", "0"], "count=0"),
        (["--to", "a.jsonl", "--exclude", "missing.jsonl"], "prompt file not found"),
        (["--to", "a.jsonl", "--mix.position", "-1"], "give each kind a weight"),
        (["--to", "/dev/null/a.jsonl"], "cannot write /dev/null/a.jsonl"),
    ],
)
def test_unusable_arguments_exit_with_the_reason(args, complaint, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2
    assert complaint in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

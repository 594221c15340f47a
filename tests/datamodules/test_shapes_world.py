"""The shapes world: prompts in GenEval's format, and scenes that satisfy them, judged by independent measurement."""

import json
from collections import Counter

import pytest
import torch
from scipy import ndimage

from datamodules import shapes_world as world


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def components(image: torch.Tensor) -> list[tuple[tuple[slice, slice], str]]:
    """Connected regions that differ from the ground: bounding box (rows, columns) and the nearest colour's name."""
    ground = torch.tensor(world.BACKGROUND).view(3, 1, 1)
    labels, _ = ndimage.label(((image - ground).abs().amax(0) > 0.1).numpy(), structure=torch.ones(3, 3))
    found = []
    for index, box in enumerate(ndimage.find_objects(labels), start=1):
        pixels = image[:, torch.from_numpy(labels == index)].T
        distance = torch.cdist(pixels, torch.tensor(list(world.COLORS.values())))
        pure = distance.argmin(1)[distance.amin(1) < 0.02]
        found.append((box, list(world.COLORS)[int(pure.mode().values)]))
    return found


def centre(box: tuple[slice, slice]) -> tuple[float, float]:
    rows, columns = box
    return (columns.start + columns.stop) / 2, (rows.start + rows.stop) / 2


def some_prompts() -> list[dict]:
    """All shapes, counts, relations and colours, without all their combinations."""
    rows = [row for row in world.enumerate_prompts() if " photo of " in row["prompt"]]
    return [row for i, row in enumerate(rows) if row["tag"] == "counting" or i % 23 == 0]


def test_prompts_follow_genevals_format():
    rows = {row["prompt"]: row for row in world.enumerate_prompts()}
    assert rows["a photo of a ring"] == {
        "tag": "single_object", "include": [{"class": "ring", "count": 1}], "prompt": "a photo of a ring",
    }  # fmt: skip
    assert rows["a photo of two crosses"] == {
        "tag": "counting", "include": [{"class": "cross", "count": 2}],
        "exclude": [{"class": "cross", "count": 3}], "prompt": "a photo of two crosses",
    }  # fmt: skip
    # GenEval names the anchor first in "include" and the related object first in the prompt
    assert rows["a photo of a circle left of a square"] == {
        "tag": "position",
        "include": [{"class": "square", "count": 1}, {"class": "circle", "count": 1, "position": ["left of", 0]}],
        "prompt": "a photo of a circle left of a square",
    }
    assert rows["an image of a red circle and a black ring"]["include"] == [
        {"class": "circle", "count": 1, "color": "red"}, {"class": "ring", "count": 1, "color": "black"},
    ]  # fmt: skip


def test_every_scene_is_asked_for_in_every_medium():
    counts = Counter(row["tag"] for row in world.enumerate_prompts())
    # 5 media times 5 shapes; 5*4 ordered pairs; 5*3; 6*5; 20*4; 20 * 6*5
    assert counts == {
        "single_object": 25, "two_object": 100, "counting": 75, "colors": 150, "position": 400, "color_attr": 3000,
    }  # fmt: skip
    texts = [row["prompt"] for row in world.enumerate_prompts()]
    assert len(set(texts)) == len(texts)


def test_heldout_prompts_are_64_of_all_categories_and_appear_in_no_training():
    train, heldout = world.split_prompts()
    held = {row["prompt"] for row in heldout}
    assert len(held) == len(heldout) == 64
    assert Counter(row["tag"] for row in heldout) == world.HELDOUT_PER_TAG
    assert set(Counter(row["tag"] for row in train)) == set(world.TAGS)
    assert held.isdisjoint(row["prompt"] for row in train)
    pretraining = [row["prompt"] for rows in world.pretraining_prompts().values() for row in rows]
    assert len(pretraining) == 3750 - 64 and held.isdisjoint(pretraining)


def test_prompt_files_are_what_the_code_makes(tmp_path):
    train, heldout = world.split_prompts()
    for rows, packaged in ((train, world.TRAIN_PROMPTS), (heldout, world.HELDOUT_PROMPTS)):
        world.write_prompts(tmp_path / "rows.jsonl", rows)
        assert (tmp_path / "rows.jsonl").read_bytes() == packaged.read_bytes()
        assert [json.loads(line) for line in packaged.read_text().splitlines()] == rows


@pytest.mark.parametrize("metadata", some_prompts(), ids=lambda row: row["prompt"])
def test_scenes_hold_exactly_what_the_prompt_says(metadata):
    for seed in range(2):
        image = world.render(metadata, generator(seed))
        assert image.shape == (3, 32, 32) and image.dtype == torch.float32
        assert image.min() >= 0 and image.max() <= 1
        found = components(image)
        assert len(found) == sum(entry["count"] for entry in metadata["include"])
        named = Counter(entry["color"] for entry in metadata["include"] if "color" in entry)
        assert named <= Counter(color for _, color in found)
        for rows, columns in (box for box, _ in found):
            assert rows.stop - rows.start == 8 or columns.stop - columns.start == 8
            assert rows.start // 8 == (rows.stop - 1) // 8 and columns.start // 8 == (columns.stop - 1) // 8


@pytest.mark.parametrize(("relation", "axis", "sign"), [
    ("left of", 0, -1), ("right of", 0, 1), ("above", 1, -1), ("below", 1, 1),
])  # fmt: skip
def test_related_objects_lie_apart_along_the_relation(relation, axis, sign):
    include = [
        {"class": "square", "count": 1, "color": "red"},
        {"class": "circle", "count": 1, "color": "blue", "position": [relation, 0]},
    ]
    for seed in range(20):
        boxes = {color: box for box, color in components(world.render({"include": include}, generator(seed)))}
        offset = [b - a for a, b in zip(centre(boxes["red"]), centre(boxes["blue"]), strict=True)]
        assert sign * offset[axis] >= 15 and abs(offset[axis]) > abs(offset[1 - axis])


@pytest.mark.parametrize(("shape", "share"), [
    ("circle", torch.pi / 4), ("square", 1.0), ("triangle", 0.5), ("ring", torch.pi / 4 * 0.75),
    ("cross", (2 * 10 * 32 - 10 * 10) / 32**2),  # an arm is 10 of the cell's 32 sub-pixels wide
])  # fmt: skip
def test_coverage_has_the_shapes_area(shape, share):
    cover = world.coverage(shape)
    assert cover.shape == (8, 8)
    assert cover.mean().item() == pytest.approx(share, rel=0.02)


def test_triangle_points_up_and_ring_has_a_hole():
    triangle, ring = world.coverage("triangle"), world.coverage("ring")
    assert triangle[0].sum() < 1 < 7 < triangle[7].sum()
    assert ring[3, 3] == 0 and ring[3, 1] == 1


def test_no_two_objects_fill_neighbouring_cells():
    """So that two objects of one colour never look like one."""
    for seed in range(20):
        image = world.render({"include": [{"class": "square", "count": 4, "color": "red"}]}, generator(seed))
        assert len(components(image)) == 4


def test_render_depends_on_the_generator_alone():
    metadata = world.enumerate_prompts()[-1]
    torch.manual_seed(1)
    first = world.render(metadata, generator(5))
    torch.manual_seed(2)
    assert torch.equal(first, world.render(metadata, generator(5)))
    assert not torch.equal(first, world.render(metadata, generator(6)))


@pytest.mark.parametrize(("entry", "message"), [
    ({"class": "star", "count": 1}, "unknown shape 'star'"),
    ({"class": "ring", "count": 1, "color": "pink"}, "unknown color 'pink'"),
    ({"class": "ring", "count": 1, "position": ["behind", 0]}, "unknown relation 'behind'"),
    ({"class": "ring", "count": 5}, "5 objects"),
    ({"class": "ring", "count": 0}, "0 objects"),
])  # fmt: skip
def test_what_the_world_does_not_know_is_refused(entry, message):
    with pytest.raises(ValueError, match=message):
        world.render({"include": [entry]}, generator())

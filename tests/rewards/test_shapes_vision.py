import numpy as np
import pytest
import torch

from datamodules import shapes_world
from rewards.shapes_detector import COLORS, MIN_CONFIDENCE, detect
from rewards.shapes_vision import ShapesColors, ShapesDetector


@pytest.fixture(scope="module")
def scenes():
    """48 rendered scenes of all categories."""
    generator = torch.Generator().manual_seed(5)
    return torch.stack([shapes_world.render(row, generator) for row in shapes_world.split_prompts()[1][:48]])


def test_instances_are_the_detectors(scenes):
    for found, expected in zip(ShapesDetector().detect(scenes, 0.0), detect(scenes), strict=True):
        ours = sorted((i.class_name, i.score, i.box) for i in found)
        assert ours == sorted(
            (name, o["score"], tuple(o["box"])) for name, objects in expected.items() for o in objects
        )
        assert [i.score for i in found] == sorted((i.score for i in found), reverse=True)


def test_masks_are_the_pixels_of_the_object_and_colours_theirs(scenes):
    """The mask fills its box, is all of one palette colour, and is that of the detection."""
    seen = 0
    for image, found, expected in zip(scenes, ShapesDetector().detect(scenes, 0.0), detect(scenes), strict=True):
        colors = ShapesColors().classify(image, found)
        by_box = {tuple(o["box"]): o["color"] for objects in expected.values() for o in objects}
        for item, color in zip(found, colors, strict=True):
            assert color == by_box[item.box]
            assert item.mask.shape == (32, 32) and item.mask.dtype == torch.bool
            rows, columns = np.nonzero(item.mask.numpy())
            assert (columns.min(), rows.min(), columns.max() + 1, rows.max() + 1) == item.box
            offset = image[:, item.mask] - torch.tensor(COLORS[color])[:, None]
            assert offset.norm(dim=0).median() < 0.05
            seen += 1
    assert seen > 48


def test_the_least_score(scenes):
    found = ShapesDetector().detect(scenes, 0.0)
    scores = sorted(item.score for items in found for item in items)
    assert scores[0] >= MIN_CONFIDENCE
    middle = scores[len(scores) // 2]
    assert sum(map(len, ShapesDetector().detect(scenes, middle))) == sum(score > middle for score in scores)


def test_nothing_to_see():
    blank = torch.full((2, 3, 32, 32), 0.85)
    assert ShapesDetector().detect(blank, 0.0) == [[], []]
    assert ShapesColors().classify(blank[0], []) == []

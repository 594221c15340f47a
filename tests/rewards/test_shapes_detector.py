import time

import pytest
import torch
from torch.nn.functional import interpolate
from torchvision.transforms.functional import gaussian_blur

from datamodules import shapes_world
from rewards import shapes_detector
from rewards.geneval_rules import judge
from rewards.shapes_detector import COLORS, SHAPES, detect, segment


@pytest.fixture(scope="module")
def scenes():
    """300 rendered scenes and the metadata they were rendered from."""
    generator = torch.Generator().manual_seed(0)
    rows = shapes_world.split_prompts()[0]
    metadata = [rows[i] for i in torch.randperm(len(rows), generator=generator)[:300]]
    return metadata, torch.stack([shapes_world.render(row, generator) for row in metadata])


def blank(side=32):
    return torch.tensor(shapes_detector.BACKGROUND).view(3, 1, 1).repeat(1, side, side)


def paint(image, color, rows, columns):
    image[:, rows, columns] = torch.tensor(COLORS[color]).view(3, 1, 1)
    return image


def accuracy(metadata, images):
    verdicts = [judge(row, found) for row, found in zip(metadata, detect(images), strict=True)]
    return sum(verdict.strict_correct for verdict in verdicts) / len(verdicts)


def test_vocabulary_is_the_renderers():
    assert shapes_world.SHAPES == SHAPES
    assert shapes_world.COLORS == COLORS
    assert shapes_world.BACKGROUND == shapes_detector.BACKGROUND


def test_rendered_scenes_are_read_right(scenes):
    metadata, images = scenes
    assert {row["tag"] for row in metadata} == set(shapes_world.TAGS)
    assert accuracy(metadata, images) >= 0.99


@pytest.mark.parametrize(("sigma", "noise", "least"), [(0.0, 0.1, 0.98), (0.7, 0.0, 0.97), (0.7, 0.06, 0.97)])
def test_slight_blur_and_noise_do_no_harm(scenes, sigma, noise, least):
    metadata, images = scenes
    torch.manual_seed(0)
    worse = gaussian_blur(images, [5, 5], [sigma, sigma]) if sigma else images
    assert accuracy(metadata, (worse + noise * torch.randn_like(worse)).clamp(0, 1)) >= least


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("color", COLORS)
def test_one_object_of_every_shape_and_color(shape, color):
    metadata = {"include": [{"class": shape, "count": 1, "color": color}]}
    generator = torch.Generator().manual_seed(1)
    (found,) = detect(shapes_world.render(metadata, generator)[None])
    assert list(found) == [shape]
    assert [item["color"] for item in found[shape]] == [color]
    assert 0.85 < found[shape][0]["score"] <= 1.0


def test_a_pixel_aligned_square_by_hand():
    (found,) = detect(paint(blank(), "blue", slice(5, 15), slice(12, 22))[None])
    (square,) = found["square"]
    assert square["box"] == [12.0, 5.0, 22.0, 15.0]  # x0, y0, x1, y1
    assert square["color"] == "blue"


def test_antialiased_edges_have_no_color_of_their_own():
    image = paint(blank(), "black", slice(8, 18), slice(8, 18))
    edge = (torch.tensor(COLORS["black"]) + torch.tensor(shapes_detector.BACKGROUND)) / 2  # grey, nearest to green
    image[:, 8:18, 18] = edge[:, None]
    seg = segment(image[None])
    names = tuple(COLORS)
    assert {names[index] for index in seg.color.ravel() if index >= 0} == {"black"}
    assert seg.coverage[0, names.index("black"), 10, 18] == pytest.approx(0.5)


def test_pure_colors_cover_fully():
    palette = torch.tensor(list(COLORS.values())).T.reshape(3, 6, 1, 1).repeat(1, 1, 32, 32).transpose(0, 1)
    seg = segment(palette)
    for index in range(len(COLORS)):
        assert (seg.color[index] == index).all()
        assert seg.coverage[index, index].min() == pytest.approx(1.0)


def test_objects_of_one_class_come_by_falling_score(scenes):
    _, images = scenes
    counts = 0
    for found in detect(images):
        for objects in found.values():
            scores = [item["score"] for item in objects]
            assert scores == sorted(scores, reverse=True)
            counts += len(objects) > 1
    assert counts > 10


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(5, 8), slice(5, 8)),  # speck
        (slice(2, 30), slice(2, 30)),  # blob
        (slice(0, 32), slice(10, 14)),  # stripe
        (slice(5, 11), slice(5, 19)),  # brick
    ],
)
def test_what_is_no_shape_is_not_found(rows, columns):
    assert detect(paint(blank(), "red", rows, columns)[None]) == [{}]


def test_a_pale_object_is_not_found():
    ground = blank()
    object_ = paint(blank(), "red", slice(5, 15), slice(5, 15))
    assert detect((0.4 * object_ + 0.6 * ground)[None]) == [{}]
    assert "square" in detect((0.9 * object_ + 0.1 * ground)[None])[0]


def test_touching_objects_of_two_colors_are_two():
    image = paint(paint(blank(), "red", slice(5, 15), slice(4, 14)), "yellow", slice(5, 15), slice(14, 24))
    (found,) = detect(image[None])
    assert sorted(item["color"] for item in found["square"]) == ["red", "yellow"]


def test_an_image_is_read_the_same_alone_and_in_a_batch(scenes):
    _, images = scenes
    assert detect(images[:8]) == [detect(image[None])[0] for image in images[:8]]


def test_lengths_scale_with_the_image(scenes):
    metadata, images = scenes
    large = interpolate(images[:60], scale_factor=2, mode="bilinear")
    assert accuracy(metadata[:60], large) >= 0.97


def test_empty_batch_and_blank_image():
    assert detect(torch.zeros(0, 3, 32, 32)) == []
    assert detect(blank()[None]) == [{}]


@pytest.mark.parametrize("shape", [(1, 3, 32, 16), (1, 3, 2, 32, 32)])
def test_only_square_images(shape):
    with pytest.raises(ValueError, match="square images"):
        detect(torch.zeros(shape))


def test_96_images_cost_well_under_a_third_of_a_second(scenes):
    _, images = scenes
    detect(images[:2])  # templates
    seconds = []
    for _ in range(3):
        start = time.process_time()
        detect(images[:96])
        seconds.append(time.process_time() - start)
    assert min(seconds) < 0.3

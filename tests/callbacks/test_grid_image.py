import numpy as np
import pytest
import torch

from callbacks.grid_image import Block, Shelf, _fitting, _font, _wrap, draw_grid, draw_shelves, to_pictures

RED, BLUE = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.0, 1.0])


def block(caption="a prompt", images=4, size=32, scores=None, color=RED):
    return Block(caption=caption, images=color.view(1, 3, 1, 1).expand(images, 3, size, size), scores=scores)


def count(picture, color):
    pixels = np.asarray(picture).reshape(-1, 3)
    return int((pixels == (color * 255).numpy().astype(np.uint8)).all(1).sum())


def test_pixels_are_rounded_to_eight_bits():
    images = torch.tensor([0.0, 0.5, 1.0]).view(1, 3, 1, 1).expand(2, 3, 2, 5)
    (first, _) = to_pictures(images)
    assert first.size == (5, 2)
    assert first.getpixel((4, 1)) == (0, 128, 255)


def test_of_a_video_the_middle_frame_is_drawn():
    video = torch.zeros(1, 3, 3, 2, 2)
    video[:, 0, 1] = 1.0
    assert to_pictures(video)[0].getpixel((0, 0)) == (255, 0, 0)


@pytest.mark.parametrize(("size", "drawn"), [(32, 96), (4, 96), (100, 100), (200, 200), (1024, 256)])
def test_small_images_grow_by_whole_factors_and_large_ones_shrink(size, drawn):
    picture = draw_grid([block(images=2, size=size)], "title")
    assert count(picture, RED) == 2 * drawn * drawn


def test_enlarging_does_not_blur():
    image = torch.zeros(1, 3, 2, 2)
    image[0, :, 0, 0], image[0, :, 1, 1] = RED, BLUE
    picture = draw_grid([Block(caption="", images=image, scores=None)], "")
    assert count(picture, RED) == count(picture, BLUE) == 48 * 48


def test_blocks_fill_rows_and_nothing_overlaps():
    picture = draw_grid([block(color=RED), block(color=BLUE), block(color=RED)], "title")
    assert count(picture, RED) == 2 * 4 * 96 * 96
    assert count(picture, BLUE) == 4 * 96 * 96
    assert picture.width <= 1150


def test_scores_and_captions_leave_ink():
    def ink(**changes):
        return int((np.asarray(draw_grid([block(**changes)], "title")).max(-1) < 128).sum())

    assert ink(caption="") < ink(caption="a prompt") < ink(caption="a prompt", scores=[0.25, -21.3, 1.0, float("nan")])


@pytest.mark.parametrize("text", ["one two three four five six", "x" * 200, "ä ö ü " * 30, "short", ""])
@pytest.mark.parametrize("lines", [1, 2])
def test_wrapped_lines_fit_and_say_what_is_missing(text, lines):
    font = _font(13)
    wrapped = _wrap(text, 100, font, lines)
    assert 1 <= len(wrapped) <= lines
    assert all(font.getlength(line) <= 100 for line in wrapped)
    shown = " ".join(wrapped)
    complete = shown.replace(" ", "") == text.replace(" ", "")
    assert complete != shown.endswith("…")


def test_words_stay_whole_where_they_can():
    font = _font(13)
    assert _wrap("alpha beta gamma", int(font.getlength("alpha beta g")), font, 2) == ["alpha beta", "gamma"]


def test_at_least_one_character_fits():
    assert _fitting("W", 1, _font(13)) == 1


def test_shelves_stand_below_one_another_with_their_names():
    shelves = [
        Shelf(name="best", blocks=[block(images=1, color=RED)] * 3),
        Shelf(name="worst", blocks=[block(images=1, color=BLUE)]),
    ]
    picture = draw_shelves(shelves, "title")
    assert count(picture, RED) == 3 * 192 * 192
    assert count(picture, BLUE) == 192 * 192
    rows = np.nonzero((np.asarray(picture) == [0, 0, 255]).all(-1))[0]
    assert rows.min() > np.nonzero((np.asarray(picture) == [255, 0, 0]).all(-1))[0].max()
    assert draw_shelves([Shelf(name="", blocks=[block(images=1, size=512, scores=[0.123])])], "").height > 256

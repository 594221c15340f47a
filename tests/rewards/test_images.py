import numpy as np
import pytest
import torch
from PIL import Image

from rewards.brightness import Brightness
from rewards.images import as_batch, as_pil, eight_bit, refuse_video


def test_every_form_of_an_image_gives_the_same_batch():
    pixels = torch.randint(0, 256, (2, 3, 5, 7), dtype=torch.uint8)
    pictures = [Image.fromarray(image.permute(1, 2, 0).numpy()) for image in pixels]
    expected = pixels.double().div(255).float()
    assert torch.equal(as_batch(pixels), expected)
    assert torch.equal(as_batch(pictures), expected)
    assert torch.equal(as_batch(expected), expected)
    assert torch.equal(as_batch(pictures[0]), expected[:1])
    assert torch.equal(as_batch(pixels[0]), expected[:1])


def test_transparency_and_palettes_become_rgb():
    picture = Image.new("RGBA", (2, 2), (10, 20, 30, 40))
    assert eight_bit(as_batch(picture))[0, :, 0, 0].tolist() == [10, 20, 30]
    assert as_batch(Image.new("L", (2, 2), 51))[0, :, 1, 1].tolist() == pytest.approx([0.2] * 3)


def test_eight_bits_round_to_nearest_and_every_level_survives():
    assert eight_bit(torch.tensor([0.0, 0.4 / 255, 0.6 / 255, 1.0])).tolist() == [0, 0, 1, 255]
    levels = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(eight_bit(levels.float() / 255), levels)


def test_as_pil_keeps_pixels_in_place():
    images = torch.zeros(1, 3, 2, 3)
    images[0, 1, 0, 2] = 1.0
    (picture,) = as_pil(images)
    assert picture.size == (3, 2)
    assert np.asarray(picture)[0, 2].tolist() == [0, 255, 0]


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([Image.new("RGB", (2, 2)), Image.new("RGB", (3, 2))], r"2 sizes \[\(2, 2\), \(3, 2\)\]"),
        ([], "0 sizes"),
        (torch.zeros(1, 4, 2, 2), r"shape \(1, 4, 2, 2\)"),
        (torch.zeros(1, 3, 2, 2, dtype=torch.int64), "int64"),
    ],
)
def test_what_is_no_batch_of_images(images, message):
    with pytest.raises(ValueError, match=message):
        as_batch(images)


def test_videos_are_refused_with_the_remedy():
    refuse_video(torch.zeros(1, 3, 2, 2), Brightness())
    with pytest.raises(ValueError, match=r"Brightness.*\(1, 3, 5, 2, 2\).*MeanOverFrames of rewards/video.py"):
        refuse_video(torch.zeros(1, 3, 5, 2, 2), Brightness())

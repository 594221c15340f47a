import pytest
import torch

from rewards.compressibility import Compressibility
from rewards.images import as_batch, as_pil


def score(reward, images):
    return reward(images, [""] * len(images), [{}] * len(images))


def test_kilobytes_of_the_file_on_disk(tmp_path):
    images = torch.rand(2, 3, 32, 48)
    sizes = []
    for index, picture in enumerate(as_pil(images)):
        picture.save(tmp_path / f"{index}.jpg", quality=95)
        sizes.append((tmp_path / f"{index}.jpg").stat().st_size / 1000)
    assert score(Compressibility(prefer="large"), images).tolist() == sizes
    assert score(Compressibility(prefer="small"), images).tolist() == [-size for size in sizes]


def test_noise_is_larger_than_a_plain_ground_and_low_quality_smaller():
    images = torch.stack([torch.rand(3, 32, 32), torch.full((3, 32, 32), 0.5)])
    noise, plain = score(Compressibility(), images).tolist()
    assert noise < plain < 0
    assert score(Compressibility(quality=10), images)[0] > noise


def test_eight_bits_decide_in_batches_of_any_size():
    images = torch.rand(3, 3, 16, 16)
    expected = score(Compressibility(), images)
    assert torch.equal(score(Compressibility(), as_batch(as_pil(images))), expected)
    assert torch.equal(torch.cat([score(Compressibility(), image[None]) for image in images]), expected)


def test_identity_and_bad_arguments():
    assert Compressibility(prefer="large", quality=80).identity() == {
        "class": "rewards.compressibility.Compressibility",
        "prefer": "large",
        "quality": 80,
    }
    with pytest.raises(ValueError, match="prefer='tiny': choose one of small, large"):
        Compressibility(prefer="tiny")
    with pytest.raises(ValueError, match="quality=0: expected 1 to 95"):
        Compressibility(quality=0)
    with pytest.raises(ValueError, match="Compressibility scores images"):
        score(Compressibility(), torch.rand(1, 3, 2, 8, 8))

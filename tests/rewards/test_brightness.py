import pytest
import torch

from rewards.brightness import Brightness


def score(reward, images):
    return reward(images, [""] * len(images), [{}] * len(images))


def test_by_hand():
    images = torch.zeros(2, 3, 4, 4)
    images[1, 0] = 1.0  # mean colour (1, 0, 0)
    reward = Brightness(target=(0.5, 0.0, 0.25))
    torch.testing.assert_close(score(reward, images), -torch.tensor([0.3125, 0.3125], dtype=torch.float64))
    images[1, 0, :2] = 0.0  # mean colour (0.5, 0, 0)
    assert score(reward, images)[1].item() == pytest.approx(-0.0625)


def test_best_exactly_at_the_target_and_video_counts_all_frames():
    video = torch.zeros(1, 3, 2, 4, 4)
    video[:, :, 1] = 1.0
    assert score(Brightness(), video).item() == 0.0
    assert score(Brightness(), video[:, :, 0]).item() == pytest.approx(-0.75)


def test_low_precision_images_are_averaged_in_float64():
    images = torch.full((1, 3, 64, 64), 0.50390625, dtype=torch.bfloat16)  # 1/2 + 1/256: exact in bf16
    assert score(Brightness(), images).item() == pytest.approx(-3 / 256**2, rel=1e-9)


@pytest.mark.parametrize("target", [(0.5, 0.5), (0.5, 0.5, 1.5), (0.5, float("nan"), 0.5)])
def test_bad_target(target):
    with pytest.raises(ValueError, match="target"):
        Brightness(target=target)

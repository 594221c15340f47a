import json

import pytest
import torch

from rewards.base import Reward, check_images
from rewards.brightness import Brightness
from rewards.compressibility import Compressibility
from rewards.shapes import ShapesReward


class Constant(Reward):
    def __init__(self, scores):
        self.scores = scores

    def score(self, images, prompts, metadata):
        return self.scores


def test_scores_come_out_in_float64_without_gradient():
    images = torch.rand(2, 3, 4, 4)
    scores = Constant(torch.ones(2, dtype=torch.float16, requires_grad=True) * 2)(images, ["", ""], [{}, {}])
    assert scores.dtype == torch.float64
    assert scores.tolist() == [2.0, 2.0]


def test_gradients_are_off_while_scoring():
    class Probe(Reward):
        def score(self, images, prompts, metadata):
            return images.mean((1, 2, 3)).detach() if torch.is_grad_enabled() else images.mean((1, 2, 3))

    scores = Probe()(torch.rand(2, 3, 4, 4, requires_grad=True), ["", ""], [{}, {}])
    assert not scores.requires_grad


@pytest.mark.parametrize("scores", [torch.zeros(3), torch.zeros(2, 1), torch.tensor(0.0)])
def test_one_score_per_image(scores):
    with pytest.raises(ValueError, match="one score per image"):
        Constant(scores)(torch.rand(2, 3, 4, 4), ["", ""], [{}, {}])


@pytest.mark.parametrize(("prompts", "metadata"), [([""], [{}, {}]), (["", ""], [{}])])
def test_one_prompt_and_metadata_per_image(prompts, metadata):
    with pytest.raises(ValueError, match="give one of each per sample"):
        Constant(torch.zeros(2))(torch.rand(2, 3, 4, 4), prompts, metadata)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.zeros(3, 4, 4), "shape"),
        (torch.zeros(1, 1, 4, 4), "shape"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "divide uint8 by 255"),
        (torch.full((1, 3, 4, 4), -0.1), r"expected \[0, 1\]"),
        (torch.full((1, 3, 4, 4), 1.1), r"expected \[0, 1\]"),
        (torch.full((1, 3, 4, 4), float("nan")), r"expected \[0, 1\]"),
    ],
)
def test_bad_images(images, message):
    with pytest.raises(ValueError, match=message):
        check_images(images)


@pytest.mark.parametrize("shape", [(2, 3, 4, 4), (2, 3, 5, 4, 4), (0, 3, 4, 4)])
def test_good_images(shape):
    check_images(torch.rand(shape))


def test_settings_that_change_scores_are_part_of_the_identity():
    """Result files of different settings must not pass for comparable ones."""
    rewards = [*(ShapesReward(mode) for mode in ("soft", "strict", "correct", "dense")), Brightness(), Brightness((0.1, 0.2, 0.3)),
               Compressibility(), Compressibility(prefer="large"), Compressibility(quality=50)]  # fmt: skip
    identities = [json.dumps(reward.identity()) for reward in rewards]
    assert len(set(identities)) == len(rewards)

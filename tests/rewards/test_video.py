import pytest
import torch

from rewards.base import Reward
from rewards.brightness import Brightness
from rewards.video import EveryNthFrame, FirstFrame, MeanOverFrames, VideoReward, mean_over_frames

TARGET = (0.0, 0.0, 0.0)  # a frame of grey level g scores -3 g^2


def videos(*levels):
    """``[N, 3, F, 2, 2]`` of uniform grey frames."""
    return torch.tensor(levels)[:, None, :, None, None].expand(-1, 3, -1, 2, 2)


def score(reward, images):
    return reward(images, ["p"] * len(images), [{}] * len(images))


class Speed(VideoReward):
    """Change of the mean level per second."""

    def score_videos(self, videos, prompts, metadata):
        level = videos.mean((1, 3, 4))
        return (level[:, -1] - level[:, 0]) * self.fps / (videos.shape[2] - 1)


class Recorder(Reward):
    """Remembers what it is asked."""

    def __init__(self):
        self.calls = []

    def load(self):
        self.calls.append("load")

    def to(self, device):
        self.calls.append(("to", device))

    def score(self, images, prompts, metadata):
        self.calls.append((tuple(images.shape), list(prompts), list(metadata)))
        return torch.zeros(len(images))


@pytest.mark.parametrize(
    ("wrap", "expected"),
    [
        (FirstFrame, [-0.75, 0.0]),
        (MeanOverFrames, [-3 * (0.25 + 1.0) / 5, -3 * 1.0 / 5]),
        (lambda reward: EveryNthFrame(reward, n=2), [-3 * (0.25 + 1.0) / 3, 0.0]),  # frames 0, 2, 4
        (lambda reward: EveryNthFrame(reward, n=9), [-0.75, 0.0]),
    ],
)
def test_frames_by_hand(wrap, expected):
    batch = videos([0.5, 0.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0, 0.0])
    scores = score(wrap(Brightness(TARGET)), batch)
    torch.testing.assert_close(scores, torch.tensor(expected, dtype=torch.float64))


def test_frames_reach_the_reward_as_images_with_their_prompts():
    inner = Recorder()
    MeanOverFrames(inner)(torch.rand(2, 3, 2, 4, 5), ["a", "b"], [{"i": 0}, {"i": 1}])
    assert inner.calls == [((2, 3, 4, 5), ["a", "b"], [{"i": 0}, {"i": 1}])] * 2


@pytest.mark.parametrize("wrap", [FirstFrame, MeanOverFrames, lambda reward: EveryNthFrame(reward, n=4)])
def test_images_pass_through_unchanged(wrap):
    images = torch.rand(3, 3, 4, 4)
    assert torch.equal(score(wrap(Brightness()), images), score(Brightness(), images))


def test_a_wrapper_loads_moves_and_names_what_it_wraps():
    inner = Recorder()
    wrapped = EveryNthFrame(inner, n=3)
    wrapped.load()
    wrapped.to("cpu")
    assert inner.calls == ["load", ("to", "cpu")]
    identity = wrapped.identity()
    assert identity["n"] == 3 and identity["class"].endswith("EveryNthFrame")
    assert identity["reward"] == inner.identity()


def test_a_video_reward_knows_its_frame_rate():
    ramp = videos([0.0, 0.25, 0.5])
    assert score(Speed(fps=8.0), ramp).item() == pytest.approx(2.0)
    assert score(Speed(fps=16.0), ramp).item() == pytest.approx(4.0)
    assert Speed(fps=16.0).identity()["fps"] == 16.0


def test_a_video_reward_refuses_images():
    with pytest.raises(ValueError, match=r"Speed scores videos \[N, 3, F, H, W\], not images of shape \(1, 3, 4, 4\)"):
        score(Speed(fps=8.0), torch.rand(1, 3, 4, 4))


def test_a_video_reward_is_not_cut_into_frames():
    with pytest.raises(ValueError, match="Speed scores whole videos: use it as it is, without FirstFrame"):
        FirstFrame(Speed(fps=8.0))


@pytest.mark.parametrize("fps", [0.0, -1.0, float("nan"), float("inf")])
def test_bad_frame_rate(fps):
    with pytest.raises(ValueError, match="fps"):
        Speed(fps=fps)


def test_bad_distance_and_empty_videos():
    with pytest.raises(ValueError, match="n=0"):
        EveryNthFrame(Brightness(), n=0)
    with pytest.raises(ValueError, match="no frames"):
        mean_over_frames(lambda frame: frame.mean((1, 2, 3)), torch.rand(1, 3, 0, 2, 2), range(0))

import hashlib

import pytest
import torch
from torch import nn

from rewards.network import NetworkReward


class Sum(NetworkReward):
    """The sum of an image's values times a weight of 2, by a linear network with dropout."""

    def __init__(self, file, **options):
        super().__init__(**options)
        self.file, self.builds, self.seen = file, 0, []

    def build(self):
        self.builds += 1
        network = nn.Sequential(nn.Dropout(0.5), nn.Linear(12, 1))
        nn.init.constant_(network[1].weight, 2.0)
        nn.init.zeros_(network[1].bias)
        self.files = {"linear": self.file}
        return {"linear": network}

    def measure(self, images, prompts, metadata):
        network = self.networks["linear"]
        values = network(images.flatten(1).to(self.dtype))
        self.seen.append((network[1].weight.dtype, values.dtype, network.training, network[1].weight.requires_grad))
        return values[:, 0]


@pytest.fixture
def file(tmp_path):
    (tmp_path / "w.pt").write_bytes(b"weights")
    return tmp_path / "w.pt"


def call(reward, images):
    return reward(images, [""] * len(images), [{}] * len(images))


def test_the_network_is_read_once_frozen_and_in_eval_mode(file):
    reward, images = Sum(file), torch.rand(3, 3, 2, 2)
    assert reward.builds == 0
    for _ in range(3):
        assert call(reward, images).tolist() == pytest.approx((2 * images.sum((1, 2, 3))).tolist())
    reward.load()
    assert reward.builds == 1
    assert reward.seen[0] == (torch.float32, torch.float32, False, False)


def test_moving_reads_nothing(file):
    reward = Sum(file)
    reward.to("cpu")
    assert reward.builds == 0
    reward.load()
    reward.to("meta")
    assert reward.networks["linear"][1].weight.device.type == "meta"


def test_scores_do_not_depend_on_the_callers_precision(file):
    images = torch.full((1, 3, 2, 2), 0.1234567)
    expected = call(Sum(file), images)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            reward = Sum(file)
            assert torch.equal(call(reward, images), expected)
        assert torch.get_default_dtype() == torch.bfloat16
    finally:
        torch.set_default_dtype(dtype)
    assert reward.seen == [(torch.float32, torch.float32, False, False)]


def test_reading_leaves_random_numbers_and_default_device_alone(file):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    with torch.device("meta"):
        reward = Sum(file)
        reward.load()
    assert reward.networks["linear"][1].weight.device.type == "cpu"
    assert torch.equal(torch.rand(4), expected)


def test_the_dtype_asked_for(file):
    reward = Sum(file, dtype="bfloat16")
    assert call(reward, torch.full((1, 3, 2, 2), 0.5)).tolist() == [12.0]
    assert reward.seen[0][0] == torch.bfloat16
    with pytest.raises(ValueError, match="dtype='float64': choose one of float32, bfloat16, float16"):
        Sum(file, dtype="float64")


def test_identity_names_dtype_and_checksum(file):
    identity = Sum(file).identity()
    assert identity["class"].endswith("Sum")
    assert identity["dtype"] == "float32"
    assert identity["weights"] == {"linear": hashlib.sha256(b"weights").hexdigest()}


def test_videos_are_refused_before_anything_is_read(file):
    reward = Sum(file)
    with pytest.raises(ValueError, match="Sum scores images"):
        call(reward, torch.rand(1, 3, 2, 2, 2))
    assert reward.builds == 0

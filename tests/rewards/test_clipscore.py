import sys

import pytest
import torch

from rewards.clip import load_clip
from rewards.clipscore import CLIPScore
from rewards.images import as_batch, eight_bit
from tests.rewards.tiny_clip import LOGIT_SCALE, PROMPTS, SIDE, pictures, unit_features, write_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"), seed=2)


def score(reward, images, prompts=PROMPTS):
    return reward(images, prompts, [{}] * len(prompts))


@pytest.mark.parametrize("size", [(SIDE, SIDE), (48, 32), (9, 12)])
def test_the_cosine_of_independent_features(folder, size):
    shown = pictures(size, size, size)
    image, text = unit_features(folder, shown, PROMPTS)
    expected = (image * text).sum(1)
    assert expected.min() < 0 < expected.max()  # nothing is cut at 0
    assert score(CLIPScore(model=str(folder)), as_batch(shown)).tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_it_is_what_torchmetrics_averages(tmp_path):
    from torchmetrics.multimodal import CLIPScore as Metric

    folder = write_clip(tmp_path, seed=9)
    images = as_batch(pictures(*[(32, 32)] * 3, seed=4))
    scores = score(CLIPScore(model=str(folder), scale="x100"), images)
    clip = load_clip(str(folder), str(folder), what="test")
    metric = Metric(model_name_or_path=lambda: (clip.network, clip.processor))
    metric.update(list(eight_bit(images)), PROMPTS)
    assert scores.mean() > 0  # below, the metric would report 0
    assert metric.compute().item() == pytest.approx(scores.mean().item(), abs=1e-4)


def test_the_scales(folder):
    images = as_batch(pictures(*[(32, 32)] * 3))
    raw, x100, over_30 = (score(CLIPScore(model=str(folder), scale=s), images) for s in ("raw", "x100", "over_30"))
    assert x100.tolist() == pytest.approx((100 * raw).tolist(), rel=1e-5)
    assert over_30.tolist() == pytest.approx((LOGIT_SCALE / 30 * raw).tolist(), rel=1e-5)
    with pytest.raises(ValueError, match="scale='logit': choose one of raw, x100, over_30"):
        CLIPScore(scale="logit")


def test_half_precision_is_not_rounded_to_two_digits(folder):
    images = as_batch(pictures(*[(SIDE, SIDE)] * 3))
    half = score(CLIPScore(model=str(folder), scale="x100", dtype="bfloat16"), images)
    assert half.tolist() == pytest.approx(score(CLIPScore(model=str(folder), scale="x100"), images).tolist(), abs=5)
    assert not torch.equal(half, half.bfloat16().double())


def test_pictures_bytes_and_floats_score_the_same_in_batches_of_any_size(folder):
    reward, shown = CLIPScore(model=str(folder)), pictures(*[(33, 21)] * 3)
    expected = score(reward, as_batch(shown))
    assert torch.equal(score(reward, as_batch(eight_bit(as_batch(shown)))), expected)
    ones = [score(reward, as_batch(picture), [prompt]).item() for picture, prompt in zip(shown, PROMPTS, strict=True)]
    assert ones == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_long_prompt_keeps_its_end_token(folder):
    """Cut without it, every long prompt would have the features of the start token."""
    reward = CLIPScore(model=str(folder))
    images = as_batch(pictures((SIDE, SIDE))).expand(2, -1, -1, -1)
    one, other = score(reward, images, ["ring " * 40, "cross " * 40]).tolist()
    assert abs(one - other) > 1e-3


def test_identity_and_what_is_missing(folder, tmp_path):
    identity = CLIPScore(model=str(folder)).identity()
    assert (identity["scale"], identity["model"]) == ("raw", str(folder))
    assert len(identity["weights"]["clip"]) == 64
    with pytest.raises(ValueError, match=f"CLIPScore model: no config.json .* in {tmp_path}; run `hf download"):
        CLIPScore(model=str(tmp_path)).load()
    with pytest.raises(ValueError, match="CLIPScore model: .*openai/clip-vit-large-patch14.*hf download"):
        CLIPScore().load()


def test_videos_are_refused(folder):
    with pytest.raises(ValueError, match="CLIPScore scores images"):
        score(CLIPScore(model=str(folder)), torch.rand(1, 3, 2, 16, 16), ["ring"])


def test_another_torchmetrics_is_a_clear_error_before_any_score(folder, monkeypatch):
    import torchmetrics.functional.multimodal.clip_score  # noqa: F401

    monkeypatch.delattr(sys.modules["torchmetrics.functional.multimodal.clip_score"], "_clip_score_update")
    with pytest.raises(ValueError, match="torchmetrics .* has no per-sample CLIPScore.*install torchmetrics 1.9"):
        CLIPScore(model=str(folder)).load()

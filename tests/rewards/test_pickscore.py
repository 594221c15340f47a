import shutil

import pytest
import torch

from rewards.images import as_batch, eight_bit
from rewards.pickscore import PickScore
from tests.rewards.tiny_clip import LOGIT_SCALE, PROMPTS, SIDE, pictures, unit_features, write_clip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"), seed=2)


def make(folder, **options):
    return PickScore(model=str(folder), processor=str(folder), **options)


def score(reward, images, prompts=PROMPTS):
    return reward(images, prompts, [{}] * len(prompts))


@pytest.mark.parametrize("size", [(SIDE, SIDE), (48, 32), (20, 40), (9, 12)])
def test_the_cosine_of_independent_features(folder, size):
    shown = pictures(size, size, size)
    image, text = unit_features(folder, shown, PROMPTS)
    assert score(make(folder), as_batch(shown)).tolist() == pytest.approx((image * text).sum(1).tolist(), abs=1e-5)


def test_the_scales(folder):
    images = as_batch(pictures(*[(32, 32)] * 3))
    raw, logit, over_26 = (score(make(folder, scale=scale), images) for scale in ("raw", "logit", "over_26"))
    assert logit.tolist() == pytest.approx((LOGIT_SCALE * raw).tolist(), rel=1e-5)
    assert over_26.tolist() == pytest.approx((LOGIT_SCALE / 26 * raw).tolist(), rel=1e-5)
    with pytest.raises(ValueError, match="scale='x100': choose one of raw, over_26, logit"):
        make(folder, scale="x100")


def test_half_precision_keeps_the_logit_scale(folder):
    images = as_batch(pictures(*[(SIDE, SIDE)] * 3))
    half, full = (score(make(folder, scale="logit", dtype=dtype), images) for dtype in ("bfloat16", "float32"))
    assert half.tolist() == pytest.approx(full.tolist(), abs=0.05 * LOGIT_SCALE)
    reward = make(folder, scale="logit", dtype="bfloat16")
    reward.load()
    assert reward._clip.logit_scale == pytest.approx(LOGIT_SCALE, rel=1e-6)  # in bfloat16 it would be off by 1e-3


def test_pictures_bytes_and_floats_score_the_same_in_batches_of_any_size(folder):
    reward, shown = make(folder), pictures(*[(33, 21)] * 3)
    expected = score(reward, as_batch(shown))
    assert torch.equal(score(reward, as_batch(eight_bit(as_batch(shown)))), expected)
    assert not torch.equal(score(reward, as_batch(shown) * 0.99), expected)
    ones = [score(reward, as_batch(picture), [prompt]).item() for picture, prompt in zip(shown, PROMPTS, strict=True)]
    assert ones == pytest.approx(expected.tolist(), abs=1e-5)


def test_the_prompt_counts_and_a_long_one_is_cut_at_its_end_only(folder):
    reward, images = make(folder), as_batch(pictures(*[(SIDE, SIDE)] * 4))
    prompts = ["ring", "cross", "a" * 200, "b" + "a" * 199]
    same_image = images[:1].expand(4, -1, -1, -1)
    scores = score(reward, same_image, prompts).tolist()
    assert len({round(value, 6) for value in scores}) == 4
    long = "a" * 33 + " " + "b" * 100  # with start and end, 34 letters fill the network's 36 tokens
    image, text = unit_features(folder, pictures((SIDE, SIDE)), [long])
    assert score(reward, images[:1], [long]).item() == pytest.approx((image * text).sum().item(), abs=1e-5)


def test_identity(folder):
    identity = make(folder, scale="over_26").identity()
    assert identity["class"] == "rewards.pickscore.PickScore"
    assert (identity["scale"], identity["model"], identity["dtype"]) == ("over_26", str(folder), "float32")
    assert len(identity["weights"]["clip"]) == 64


def broken(folder, tmp_path, *names, keep=0):
    """A copy of the folder in which ``names`` are cut to ``keep`` bytes, or removed."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    for name in names:
        data = (copy / name).read_bytes()
        (copy / name).unlink()
        if keep:
            (copy / name).write_bytes(data[:keep])
    return copy


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_missing_network_file_is_one_message_with_folder_and_command(folder, tmp_path, name):
    copy = broken(folder, tmp_path, name)
    with pytest.raises(ValueError, match=f"PickScore model: no .*{name}.* in {copy}; run `hf download") as error:
        make(copy).load()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_truncated_network_file(folder, tmp_path, name):
    copy = broken(folder, tmp_path, name, keep=100)
    with pytest.raises(ValueError, match=f"PickScore model: cannot read {copy}.*`hf download") as error:
        make(copy).load()
    assert "\n" not in str(error.value)


def test_a_network_that_lacks_tensors(folder, tmp_path):
    from safetensors.torch import load_file, save_file

    copy = broken(folder, tmp_path)
    weights = load_file(copy / "model.safetensors")
    del weights["visual_projection.weight"]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="lacks 1 tensors such as visual_projection.weight"):
        make(copy).load()


def test_a_pickle_will_do_locally(folder, tmp_path):
    from safetensors.torch import load_file

    copy = broken(folder, tmp_path, "model.safetensors")
    torch.save(load_file(folder / "model.safetensors"), copy / "pytorch_model.bin")
    images = as_batch(pictures(*[(SIDE, SIDE)] * 3))
    assert torch.equal(score(make(copy), images), score(make(folder), images))


@pytest.mark.parametrize("names", [("tokenizer.json",), ("preprocessor_config.json",)])
def test_a_missing_processor_file(folder, tmp_path, names):
    copy = broken(folder, tmp_path, *names)
    reward = PickScore(model=str(folder), processor=str(copy))
    with pytest.raises(ValueError, match=f"PickScore processor: .*{copy}.*run `hf download") as error:
        reward.load()
    assert "\n" not in str(error.value)


def test_a_processor_of_another_clip(folder, tmp_path):
    from transformers import CLIPImageProcessor

    copy = broken(folder, tmp_path)
    CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}).save_pretrained(copy)
    with pytest.raises(ValueError, match="crops to 32 pixels.*reads 16 pixels"):
        PickScore(model=str(folder), processor=str(copy)).load()


def test_without_network_the_hub_is_one_message():
    with pytest.raises(ValueError, match="PickScore model: .*yuvalkirstain/PickScore_v1.*hf download"):
        PickScore().load()


def test_videos_are_refused(folder):
    with pytest.raises(ValueError, match="PickScore scores images"):
        score(make(folder), torch.rand(1, 3, 2, 16, 16), ["ring"])

import inspect

import numpy as np
import pytest
import torch

import rewards.hpsv2
from rewards.hpsv2 import HPSv2, preprocess
from rewards.images import as_batch, eight_bit
from tests.rewards.tiny_clip import OPEN_CLIP, PROMPTS, SIDE, pictures, write_hpsv2

MEAN = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
STD = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return write_hpsv2(tmp_path_factory.mktemp("hpsv2"))


def make(files, **options):
    checkpoint, architecture = files
    return HPSv2(**{"version": "v2.1", "weights": str(checkpoint), "architecture": str(architecture)} | options)


def score(reward, images, prompts=PROMPTS):
    return reward(images, prompts, [{}] * len(prompts))


def fitted(picture, antialias=True):
    """The longest side resized to SIDE in float, black bars to a square, normalised: ``[3, SIDE, SIDE]``."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None].float() / 255
    longest = max(picture.size)
    width, height = (round(side * SIDE / longest) for side in picture.size)
    if longest != SIDE:
        pixels = torch.nn.functional.interpolate(
            pixels, (height, width), mode="bicubic", align_corners=False, antialias=antialias
        )
    square = torch.zeros(3, SIDE, SIDE)
    top, left = (SIDE - height) // 2, (SIDE - width) // 2
    square[:, top : top + height, left : left + width] = pixels[0]
    return (square - MEAN) / STD


@pytest.mark.parametrize("size", [(SIDE, SIDE), (64, 64), (48, 32), (21, 40), (9, 12), (SIDE, 10)])
def test_the_cosine_of_independent_features(files, size):
    import open_clip

    model = open_clip.CLIP(**OPEN_CLIP).eval()
    model.load_state_dict(torch.load(files[0])["state_dict"])
    shown = pictures(size, size, size)
    with torch.no_grad():
        image = model.encode_image(torch.stack([fitted(picture) for picture in shown])).double()
        text = model.encode_text(open_clip.tokenize(PROMPTS)).double()
    expected = (image * text).sum(1) / (image.square().sum(1) * text.square().sum(1)).sqrt()
    assert score(make(files), as_batch(shown)).tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_wide_image_is_fitted_and_padded_with_black_not_cropped():
    pixels = preprocess(torch.full((1, 3, 20, 40), 255, dtype=torch.uint8), 16)[0] * STD + MEAN
    bars, middle = torch.cat([pixels[:, :4], pixels[:, 12:]], 1), pixels[:, 4:12]
    assert bars.abs().max() < 1e-6
    assert (middle - 1).abs().max() < 1e-6


@pytest.mark.parametrize("antialias", [True, False])
@pytest.mark.parametrize("size", [(64, 40), (40, 64)])
def test_preprocessing_with_and_without_antialias(antialias, size):
    (picture,) = pictures(size)
    pixels = preprocess(eight_bit(as_batch(picture)), SIDE, antialias=antialias)[0]
    assert torch.allclose(pixels, fitted(picture, antialias), atol=1e-5)
    assert not torch.allclose(pixels, fitted(picture, not antialias), atol=1e-3)


def test_the_version_has_no_default():
    assert inspect.signature(HPSv2).parameters["version"].default is inspect.Parameter.empty
    with pytest.raises(ValueError, match="version='v2': choose one of v2.0, v2.1"):
        HPSv2(version="v2")


def test_a_folder_gives_the_checkpoint_of_the_version(tmp_path):
    two, architecture = write_hpsv2(tmp_path, "HPS_v2_compressed.pt", seed=0)
    one, _ = write_hpsv2(tmp_path, "HPS_v2.1_compressed.pt", seed=1)
    images, options = as_batch(pictures(*[(SIDE, SIDE)] * 3)), {"architecture": str(architecture)}
    for version, file in (("v2.0", two), ("v2.1", one)):
        by_folder = score(HPSv2(version=version, weights=str(tmp_path), **options), images)
        assert torch.equal(by_folder, score(HPSv2(version=version, weights=str(file), **options), images))
    assert not torch.equal(by_folder, score(HPSv2(version="v2.0", weights=str(tmp_path), **options), images))
    with pytest.raises(ValueError, match="version='v2.0', but .*HPS_v2.1_compressed.pt is the checkpoint of the other"):
        HPSv2(version="v2.0", weights=str(one), **options).load()


def test_the_scales(files):
    images = as_batch(pictures(*[(32, 32)] * 3))
    raw, x100 = (score(make(files, scale=scale), images) for scale in ("raw", "x100"))
    assert x100.tolist() == pytest.approx((100 * raw).tolist(), rel=1e-6)
    assert raw.abs().max() <= 1
    with pytest.raises(ValueError, match="scale='logit': choose one of raw, x100"):
        make(files, scale="logit")


def test_pictures_bytes_and_floats_score_the_same(files):
    reward, shown = make(files), pictures(*[(33, 21)] * 3)
    expected = score(reward, as_batch(shown))
    bytes_ = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in shown])
    assert torch.equal(score(reward, as_batch(bytes_)), expected)
    assert torch.equal(score(reward, as_batch(bytes_.float() / 255)), expected)
    nearby = (as_batch(shown) + 0.4 / 255).clamp(max=1)
    assert torch.equal(score(reward, nearby), expected)  # the same 8 bits


def test_the_batch_size_does_not_change_a_score(files):
    reward, shown = make(files), pictures(*[(40, 24)] * 7)
    prompts = [f"{word} {index}" for index, word in enumerate((PROMPTS * 3)[:7])]
    together = score(reward, as_batch(shown), prompts).tolist()
    alone = [score(reward, as_batch(picture), [prompt]).item() for picture, prompt in zip(shown, prompts, strict=True)]
    assert alone == pytest.approx(together, abs=1e-5)
    assert len({round(value, 4) for value in together}) == 7


def test_the_checkpoint_is_read_once_over_many_calls(files, monkeypatch):
    reads = []
    monkeypatch.setattr(rewards.hpsv2, "read_weights", lambda file: reads.append(file) or torch.load(file))
    reward, images = make(files), as_batch(pictures(*[(SIDE, SIDE)] * 3))
    assert reads == []
    for _ in range(3):
        score(reward, images)
    assert len(reads) == 1


def test_half_precision(files):
    images = as_batch(pictures(*[(SIDE, SIDE)] * 3))
    half = score(make(files, dtype="bfloat16"), images)
    assert half.tolist() == pytest.approx(score(make(files), images).tolist(), abs=0.05)


def test_identity(files):
    identity = make(files, scale="x100", antialias=False).identity()
    assert identity["class"] == "rewards.hpsv2.HPSv2"
    assert (identity["version"], identity["scale"], identity["antialias"]) == ("v2.1", "x100", False)
    assert len(identity["weights"]["clip"]) == 64


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("/nowhere/HPS.pt", "HPSv2 v2.1 weights: no /nowhere/HPS.pt.*hf download xswu/HPSv2 HPS_v2.1_compressed.pt"),
        ("xswu/HPSv2", "no HPS_v2.1_compressed.pt of xswu/HPSv2 in .*`hf download xswu/HPSv2 HPS_v2.1_compressed.pt`"),
    ],
)
def test_a_missing_checkpoint_is_one_message_with_path_and_command(files, weights, message):
    with pytest.raises(ValueError, match=message) as error:
        make(files, weights=weights).load()
    assert "\n" not in str(error.value)


def test_unusable_checkpoints(files, tmp_path):
    whole, file = files[0].read_bytes(), tmp_path / "weights.pt"
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=f"cannot read weights from {file}.*truncated"):
        make(files, weights=str(file)).load()
    torch.save({"weights": {}}, file)
    with pytest.raises(ValueError, match="has no 'state_dict'.*hf download"):
        make(files, weights=str(file)).load()
    torch.save({"state_dict": {"logit_scale": torch.tensor(1.0)}}, file)
    with pytest.raises(ValueError, match="are of another network .*Missing key"):
        make(files, weights=str(file)).load()
    with pytest.raises(ValueError, match="architecture='ViT-H-15': neither a model of open_clip"):
        make(files, architecture="ViT-H-15").load()


def test_the_default_network_is_open_clips_vit_h_14():
    import open_clip

    default = inspect.signature(HPSv2).parameters["architecture"].default
    assert open_clip.get_model_config(default)["vision_cfg"] == {
        "image_size": 224, "layers": 32, "width": 1280, "head_width": 80, "patch_size": 14,
    }  # fmt: skip


def test_videos_are_refused(files):
    with pytest.raises(ValueError, match="HPSv2 scores images"):
        score(make(files), torch.rand(1, 3, 2, 16, 16), ["ring"])

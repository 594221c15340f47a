import pytest
import torch

from rewards.aesthetic import Aesthetic
from rewards.images import as_batch, eight_bit
from tests.rewards.tiny_clip import SIDE, pictures, unit_features, write_clip

WIDTH = 6
SIZES = [(1024, WIDTH), (128, 1024), (64, 128), (16, 64), (1, 16)]
KINDS = ("weight", "bias")
NAMES = (0, 2, 4, 6, 7)  # dropout sits at 1, 3 and 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_clip(tmp_path_factory.mktemp("clip"), seed=2)


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """The two published heads' files, with random weights: head -> (file, its affine maps)."""
    folder, random = tmp_path_factory.mktemp("heads"), torch.Generator().manual_seed(0)

    def affine(rows, columns):
        return torch.randn(rows, columns, generator=random) / columns**0.5, torch.randn(rows, generator=random)

    mlp = [affine(*size) for size in SIZES]
    linear = [affine(1, WIDTH)]
    named = {
        f"layers.{name}.{kind}": map[kind == "bias"] for name, map in zip(NAMES, mlp, strict=True) for kind in KINDS
    }
    torch.save(named, folder / "aesthetic-model.pth")
    torch.save(dict(zip(KINDS, linear[0], strict=True)), folder / "sa_0_4_vit_l_14_linear.pth")
    return {"mlp": (folder, mlp), "linear": (folder / "sa_0_4_vit_l_14_linear.pth", linear)}


def make(folder, heads, head, **options):
    return Aesthetic(head=head, head_weights=str(heads[head][0]), model=str(folder), **options)


def score(reward, images):
    return reward(images, [""] * len(images), [{}] * len(images))


@pytest.mark.parametrize("head", ["mlp", "linear"])
@pytest.mark.parametrize("size", [(SIDE, SIDE), (48, 32)])
def test_the_affine_maps_of_independent_features(folder, heads, head, size):
    shown = pictures(size, size, size)
    values, _ = unit_features(folder, shown, ["a"])
    for weight, bias in heads[head][1]:
        values = values @ weight.double().T + bias.double()
    assert score(make(folder, heads, head), as_batch(shown)).tolist() == pytest.approx(values[:, 0].tolist(), abs=1e-4)


def test_pictures_bytes_and_floats_score_the_same_in_batches_of_any_size(folder, heads):
    reward, shown = make(folder, heads, "mlp"), pictures(*[(33, 21)] * 3)
    expected = score(reward, as_batch(shown))
    assert torch.equal(score(reward, as_batch(eight_bit(as_batch(shown)))), expected)
    ones = [score(reward, as_batch(picture)).item() for picture in shown]
    assert ones == pytest.approx(expected.tolist(), abs=1e-5)


def test_half_precision(folder, heads):
    images = as_batch(pictures(*[(SIDE, SIDE)] * 3))
    full, half = score(make(folder, heads, "mlp"), images), score(make(folder, heads, "mlp", dtype="bfloat16"), images)
    assert half.tolist() == pytest.approx(full.tolist(), abs=0.1)


def test_identity_has_the_checksum_of_both_networks(folder, heads):
    identity = make(folder, heads, "linear").identity()
    assert (identity["head"], identity["model"]) == ("linear", str(folder))
    assert {name: len(sha) for name, sha in identity["weights"].items()} == {"clip": 64, "head": 64}


def test_a_head_of_another_kind(folder, heads):
    with pytest.raises(ValueError, match="aesthetic mlp head: the weights in .*linear.pth are of another network"):
        Aesthetic(head="mlp", head_weights=str(heads["linear"][0]), model=str(folder)).load()
    with pytest.raises(ValueError, match="head='relu': choose one of mlp, linear"):
        Aesthetic(head="relu")


def test_what_is_missing_or_truncated(folder, heads, tmp_path):
    with pytest.raises(ValueError, match="aesthetic mlp head: no aesthetic-model.pth of trl-lib/.*hf download trl-lib"):
        Aesthetic().load()
    with pytest.raises(ValueError, match="no /nowhere/linear.pth.*curl -LO https://github.com/LAION-AI/"):
        Aesthetic(head="linear", head_weights="/nowhere/linear.pth").load()
    with pytest.raises(ValueError, match="aesthetic model: no config.json .*hf download"):
        Aesthetic(head_weights=str(heads["mlp"][0]), model=str(tmp_path)).load()
    cut = tmp_path / "cut.pth"
    cut.write_bytes(heads["linear"][0].read_bytes()[:300])
    with pytest.raises(ValueError, match=f"cannot read weights from {cut}"):
        Aesthetic(head="linear", head_weights=str(cut), model=str(folder)).load()


def test_videos_are_refused(folder, heads):
    with pytest.raises(ValueError, match="Aesthetic scores images"):
        score(make(folder, heads, "mlp"), torch.rand(1, 3, 2, 16, 16))

"""Mask2Former's surroundings, against a slow reference in plain loops and float64, and its wiring on a tiny network."""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from datamodules import geneval_prompts
from rewards.coco import CLASSES
from rewards.images import as_batch
from rewards.mask2former import MODEL, Mask2Former, mask_box, postprocess, preprocess
from tests.rewards.tiny_clip import pictures
from tests.rewards.tiny_mask2former import QUERIES, make_mask2former, write_mask2former


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_mask2former(tmp_path_factory.mktemp("mask2former"))


def tiny(folder, **options):
    detector = Mask2Former(str(folder), **{"short_side": 64, "long_side": 120, **options})
    detector.build()["detector"].eval()
    return detector


@torch.no_grad()
def detect(detector, images, min_score=0.0):
    return detector.detect(images, min_score)


# -- the reference ----------------------------------------------------------------------------------------------------


def bilinear(source, target):
    """``[target, source]``: each output pixel's centre is a mixture of the two nearest input centres, edges repeated."""
    weights = np.zeros((target, source))
    for row in range(target):
        place = min(max((row + 0.5) * source / target - 0.5, 0.0), source - 1)
        low = math.floor(place)
        weights[row, low] += 1 - (place - low)
        weights[row, min(low + 1, source - 1)] += place - low
    return weights


def resized(logits, size):
    return bilinear(logits.shape[0], size[0]) @ logits @ bilinear(logits.shape[1], size[1]).T


def reference(class_logits, mask_logits, padded, scaled, size, top=100):
    """``(class, score, box, mask)`` of every kept pair of a query and a class, by falling score."""
    pairs = []
    for query, logits in enumerate(class_logits.double().numpy()):
        exponentials = [math.exp(value - max(logits)) for value in logits]
        for label, value in enumerate(exponentials[:-1]):  # the last is "no object"
            pairs.append((value / sum(exponentials), query, label))
    found = []
    for probability, query, label in sorted(pairs, key=lambda pair: -pair[0])[:top]:
        logits = resized(mask_logits[query].double().numpy(), padded)[: scaled[0], : scaled[1]]
        logits = resized(logits, size)
        inside = [(x, y) for y in range(size[0]) for x in range(size[1]) if logits[y, x] > 0]
        if not inside:
            continue
        certainty = sum(1 / (1 + math.exp(-logits[y, x])) for x, y in inside) / (len(inside) + 1e-6)
        xs, ys = zip(*inside, strict=True)
        box = (min(xs), min(ys), max(xs) + 1, max(ys) + 1)
        found.append((CLASSES[label], probability * certainty, box, logits > 0))
    return sorted(found, key=lambda item: -item[1])


def agree(instances, expected):
    assert len(instances) == len(expected) > 0
    for instance, (name, score, box, mask) in zip(instances, expected, strict=True):
        assert instance.class_name == name
        assert instance.score == pytest.approx(score, rel=1e-4)
        assert instance.box == box
        assert instance.mask.dtype == torch.bool and (instance.mask.numpy() == mask).all()


# -- the output -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("padded", "scaled", "size"),
    [
        ((32, 32), (32, 32), (32, 32)),
        ((32, 64), (25, 51), (13, 27)),  # odd, not square, smaller than what the network saw
        ((64, 32), (61, 30), (79, 39)),  # larger
    ],
)
def test_objects_are_those_of_the_slow_reference(padded, scaled, size):
    """3 queries and 80 classes, so that 140 of the 240 pairs are dropped; logits spread so that scores do not tie."""
    random = torch.Generator().manual_seed(sum(size))
    classes = torch.randn(3, 81, generator=random)
    masks = torch.randn(3, padded[0] // 4, padded[1] // 4, generator=random)
    expected = reference(classes, masks, padded, scaled, size)
    options = {"padded": padded, "scaled": scaled, "size": size}
    agree(postprocess(classes, masks, min_score=0.0, **options), expected)
    assert len(expected) == 100
    half = expected[50][1] * (1 + 1e-3)
    agree(postprocess(classes, masks, min_score=half, **options), expected[:50])


def test_a_score_by_hand():
    """Class probability 1/2 (the other half is "no object"), mask probabilities 3/4 and 1/2 + on two pixels."""
    classes = torch.full((1, 81), -100.0)
    classes[0, 66] = classes[0, 80] = 0.0
    masks = torch.full((1, 2, 3), -5.0)
    masks[0, 1, 1:] = torch.tensor([math.log(3), math.log(4)])  # sigmoid 3/4 and 4/5
    size = (2, 3)
    (found,) = postprocess(classes, masks, padded=size, scaled=size, size=size, min_score=0.1)
    assert found.class_name == "computer keyboard"
    assert found.score == pytest.approx(0.5 * (0.75 + 0.8) / 2, abs=1e-6)
    assert found.box == (1.0, 1.0, 3.0, 2.0)
    assert found.mask.tolist() == [[False] * 3, [False, True, True]]
    assert postprocess(classes, masks, padded=size, scaled=size, size=size, min_score=found.score) == []


def test_one_query_may_be_of_two_classes_and_overlaps_stay():
    classes = torch.full((2, 81), -100.0)
    classes[0, 15], classes[0, 16] = 0.0, -0.5  # cat, perhaps a dog
    classes[1, 15] = 0.0
    masks = torch.full((2, 4, 4), 9.0)
    size = (4, 4)
    found = postprocess(classes, masks, padded=size, scaled=size, size=size, min_score=0.3)
    assert [item.class_name for item in found] == ["cat", "cat", "dog"]
    assert {item.box for item in found} == {(0.0, 0.0, 4.0, 4.0)}


def test_an_empty_mask_is_no_object():
    classes = torch.full((1, 81), -100.0)
    classes[0, 3] = 0.0
    size = (4, 6)
    assert postprocess(classes, torch.full((1, 2, 3), -1.0), padded=size, scaled=size, size=size, min_score=0.0) == []
    assert mask_box(torch.zeros(4, 6, dtype=torch.bool)) == (0.0, 0.0, 0.0, 0.0)


def test_classes_are_cocos_by_index_under_genevals_names():
    assert len(CLASSES) == 80
    assert [CLASSES[index] for index in (0, 22, 53, 64, 65, 66, 67, 79)] == [
        *("person", "zebra", "pizza", "computer mouse", "tv remote", "computer keyboard", "cell phone", "toothbrush"),
    ]
    assert geneval_prompts.CLASSES == CLASSES


# -- the input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "scaled", "padded"),
    [
        ((512, 512), (800, 800), (800, 800)),
        ((1024, 1024), (800, 800), (800, 800)),
        ((333, 500), (800, 1201), (800, 1216)),  # 500 * 800 / 333 = 1201.2
        ((400, 100), (1333, 333), (1344, 352)),  # the long side decides: 100 * 1333 / 400 = 333.25
    ],
)
def test_sizes(size, scaled, padded):
    pixels, actual = preprocess(torch.zeros(1, 3, *size), 800, 1333)
    assert (actual, tuple(pixels.shape)) == (scaled, (1, 3, *padded))


def test_pixels_are_scaled_by_pil_padded_with_grey_and_normalised():
    shown = pictures((50, 33))
    pixels, scaled = preprocess(as_batch(shown), 40, 400)
    assert (scaled, tuple(pixels.shape)) == ((40, 61), (1, 3, 64, 64))
    canvas = Image.new("RGB", (64, 64), (128, 128, 128))
    canvas.paste(shown[0].resize((61, 40), Image.Resampling.BILINEAR), (0, 0))
    expected = (np.asarray(canvas, dtype=np.float64) - [123.675, 116.28, 103.53]) / [58.395, 57.12, 57.375]
    assert pixels[0].double().numpy() == pytest.approx(expected.transpose(2, 0, 1), abs=1e-5)


# -- the network ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(33, 50), (64, 64), (97, 41)])
def test_the_whole_way_on_a_tiny_network(folder, size):
    images = as_batch(pictures(*[size[::-1]] * 2))
    detector = tiny(folder)
    pixels, scaled = preprocess(images, 64, 120)
    with torch.no_grad():
        output = make_mask2former()(pixel_values=pixels)
    assert output.class_queries_logits.shape == (2, QUERIES, 81)
    for found, classes, masks in zip(
        detect(detector, images), output.class_queries_logits, output.masks_queries_logits, strict=True
    ):
        agree(found, reference(classes, masks, pixels.shape[-2:], scaled, size))
        assert found[0].score > 0.3


def test_a_batch_finds_what_single_images_show(folder):
    images, detector = as_batch(pictures(*[(48, 36)] * 3)), tiny(folder)
    together = detect(detector, images, 0.05)
    assert sum(map(len, together)) > 3
    for image, found in zip(images, together, strict=True):
        (alone,) = detect(detector, image[None], 0.05)
        assert [(i.class_name, i.box) for i in alone] == [(i.class_name, i.box) for i in found]
        assert [i.score for i in alone] == pytest.approx([i.score for i in found], abs=1e-5)


def test_half_precision(folder):
    images, detector = as_batch(pictures((48, 36))), tiny(folder)
    full = detect(detector, images, 0.05)[0][0]
    detector._network.to(torch.bfloat16)
    half = detect(detector, images, 0.05)[0][0]
    assert half.class_name == full.class_name
    assert half.score == pytest.approx(full.score, abs=0.05)


def test_identity_and_files(folder):
    detector = tiny(folder)
    assert detector.files == {"detector": folder / "model.safetensors"}
    identity = detector.identity()
    assert (identity["implementation"], identity["model"]) == ("transformers", str(folder))
    assert (identity["short_side"], identity["long_side"]) == (64, 120)


def test_a_pickle_of_tensors_will_do(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    torch.save(make_mask2former().state_dict(), tmp_path / "pytorch_model.bin")
    images = as_batch(pictures((48, 36)))
    assert detect(tiny(tmp_path), images)[0][0].score == detect(tiny(folder), images)[0][0].score


def test_what_is_missing_truncated_or_foreign(folder, tmp_path):
    get = f"hf download {MODEL} --include 'config.json' --include 'model.safetensors'"
    with pytest.raises(ValueError, match=f"detector Mask2Former: no config.json, model.safetensors of {MODEL} .*{get}"):
        Mask2Former().build()
    with pytest.raises(ValueError, match="no folder /nowhere/at/all"):
        Mask2Former("/nowhere/at/all").build()
    with pytest.raises(ValueError, match=f"no config.json and model.safetensors in {tmp_path}; run `{get}`"):
        Mask2Former(str(tmp_path)).build()
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(ValueError, match=f"cannot read {tmp_path}/model.safetensors .*get it again: `{get}`"):
        Mask2Former(str(tmp_path)).build()
    panoptic = write_mask2former(tmp_path / "panoptic", labels=133)
    with pytest.raises(ValueError, match=f"the network in {panoptic} knows 133 classes, not COCO's 80"):
        Mask2Former(str(panoptic)).build()


def test_a_part_of_a_checkpoint(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    weights = {name: w for name, w in make_mask2former().state_dict().items() if "class_predictor" not in name}
    torch.save(weights, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="lacks 2 tensors such as class_predictor.bias"):
        Mask2Former(str(tmp_path)).build()


def test_sides():
    with pytest.raises(ValueError, match="short_side=900, long_side=800"):
        Mask2Former(short_side=900, long_side=800)

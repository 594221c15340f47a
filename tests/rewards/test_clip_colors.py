"""CLIP's colours against plain arithmetic on what its two towers put out, with a tiny random network."""

import json

import numpy as np
import open_clip
import pytest
import torch
from PIL import Image

from rewards.clip_colors import WEIGHTS, WEIGHTS_FILE, CLIPColors, cut_out
from rewards.images import as_batch
from rewards.vision import Instance
from tests.rewards.tiny_clip import OPEN_CLIP, SIDE, pictures, randomise

COLORS = ["red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white"]
SEED = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """``tiny.json`` and a checkpoint of it in the published format."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("clip")
    (folder / "tiny.json").write_text(json.dumps(OPEN_CLIP | {"quick_gelu": True}))
    network = randomise(open_clip.CLIP(**OPEN_CLIP, quick_gelu=True), SEED)
    save_file(network.state_dict(), folder / WEIGHTS_FILE)
    return folder


@pytest.fixture(scope="module")
def colors(folder):
    classifier = CLIPColors(str(folder), str(folder / "tiny.json"))
    classifier.build()["colors"].eval().requires_grad_(False)
    return classifier


def instance(name, box, size, seed=0):
    """An object whose mask is speckled inside its box; ``size`` is width and height."""
    x0, y0, x1, y1 = box
    mask = torch.zeros(size[1], size[0], dtype=torch.bool)
    random = torch.Generator().manual_seed(seed)
    mask[y0:y1, x0:x1] = torch.rand(y1 - y0, x1 - x0, generator=random) < 0.7
    return Instance(class_name=name, score=0.5, box=tuple(map(float, box)), mask=mask)


def greyed(picture, item):
    """The crop by array arithmetic."""
    pixels = np.asarray(picture).copy()
    pixels[~item.mask.numpy()] = 153
    x0, y0, x1, y1 = map(int, item.box)
    return Image.fromarray(pixels[y0:y1, x0:x1])


def prepared(crop):
    """open_clip's transform written out: short side to SIDE by PIL, central square (a half rounds to even), normalised."""
    short = min(crop.size)
    width, height = (SIDE * side // short for side in crop.size)
    left, top = round((width - SIDE) / 2), round((height - SIDE) / 2)
    crop = crop.resize((width, height), Image.Resampling.BICUBIC).crop((left, top, left + SIDE, top + SIDE))
    mean, std = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
    return torch.from_numpy((np.asarray(crop) / 255 - mean) / std).permute(2, 0, 1).float()[None]


@torch.no_grad()
def likenesses(network, picture, item):
    """Cosine of the crop and each colour in float64, the templates written out."""
    tokens = open_clip.SimpleTokenizer(context_length=77)
    image = network.encode_image(prepared(greyed(picture, item)))[0].double()
    result = []
    for color in COLORS:
        texts = [
            f"a photo of a {color} {item.class_name}",
            f"a photo of a {color}-colored {item.class_name}",
            f"a photo of a {color} object",
        ]
        features = network.encode_text(tokens(texts)).double()
        mean = sum(f / f.norm() for f in features) / 3
        result.append((mean @ image / mean.norm() / image.norm()).item())
    return result


def test_the_colour_is_that_of_plain_arithmetic(folder, colors):
    size = (37, 29)
    network = randomise(open_clip.CLIP(**OPEN_CLIP, quick_gelu=True), SEED).eval()
    boxes = [(0, 0, 37, 29), (3, 2, 30, 12), (20, 5, 27, 29), (1, 1, 9, 9)]
    names = ["car", "teddy bear", "vase", "car"]
    answers = []
    for picture in pictures(*[size] * 3):
        items = [instance(name, box, size, seed) for seed, (name, box) in enumerate(zip(names, boxes, strict=True))]
        image = as_batch(picture)[0]
        expected = np.array([likenesses(network, picture, item) for item in items])
        assert colors.likeness(image, items).numpy() == pytest.approx(expected, abs=1e-5)
        ranked = np.sort(expected, axis=1)
        assert (ranked[:, -1] - ranked[:, -2]).min() > 1e-4  # no tie that rounding could decide
        found = [COLORS[index] for index in expected.argmax(1)]
        assert colors.classify(image, items) == found
        assert [colors.classify(image, [item])[0] for item in items] == found
        answers += found
    assert len(set(answers)) > 1


def test_only_the_object_and_grey_are_seen(colors):
    size = (24, 24)
    item = instance("cup", (4, 4, 20, 18), size)
    (picture,) = pictures(size)
    assert np.array_equal(np.asarray(cut_out(picture, item)), np.asarray(greyed(picture, item)))
    changed = as_batch(picture)[0].where(item.mask, 1.0)
    assert colors.classify(changed, [item]) == colors.classify(as_batch(picture)[0], [item])


def test_nothing_to_classify(colors):
    assert colors.classify(torch.zeros(3, 8, 8), []) == []


def test_the_network_has_the_activation_that_its_weights_were_trained_with(folder):
    """open_clip itself says which: its ``openai`` tag of ViT-L-14."""
    published = open_clip.get_pretrained_cfg("ViT-L-14", "openai")
    assert published["quick_gelu"] and published["hf_hub"] == f"{WEIGHTS}/"
    assert open_clip.get_model_config(CLIPColors().architecture)["quick_gelu"]
    network = CLIPColors(str(folder), str(folder / "tiny.json")).build()["colors"]
    assert any(isinstance(module, open_clip.transformer.QuickGELU) for module in network.modules())


def test_a_file_and_identity(folder):
    classifier = CLIPColors(str(folder / WEIGHTS_FILE), str(folder / "tiny.json"))
    classifier.build()
    assert classifier.files == {"colors": folder / WEIGHTS_FILE}
    assert classifier.identity()["architecture"] == str(folder / "tiny.json")


def test_what_is_missing_or_foreign(folder, tmp_path):
    get = f"hf download {WEIGHTS} {WEIGHTS_FILE}"
    with pytest.raises(ValueError, match=f"CLIP weights: no {WEIGHTS_FILE} of {WEIGHTS} .*`{get}`"):
        CLIPColors().build()
    with pytest.raises(ValueError, match=f"no {tmp_path}/{WEIGHTS_FILE}.*To get it: {get}"):
        CLIPColors(str(tmp_path)).build()
    with pytest.raises(ValueError, match="architecture='ViT-Q': neither a model of open_clip"):
        CLIPColors(str(folder), "ViT-Q").build()
    (tmp_path / "wide.json").write_text(json.dumps(OPEN_CLIP | {"embed_dim": 12}))
    with pytest.raises(ValueError, match="are of another network"):
        CLIPColors(str(folder), str(tmp_path / "wide.json")).build()

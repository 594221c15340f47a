import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load, save

from rewards.png import data_url, decode_png, encode_png
from rewards.wire import ScoreRequest, fingerprint, pack, pack_answer, unpack, unpack_answer

HEAD = {"id": "a", "shape": [1, 3, 2, 2], "prompts": ["p"], "metadata": [{}]}
IMAGES = torch.rand(1, 3, 2, 2)


def request(images, prompts=None, metadata=None):
    count = len(images)
    return ScoreRequest(id="id", images=images, prompts=prompts or ("p",) * count, metadata=metadata or ({},) * count)


def body(head=None, **tensors):
    text = json.dumps(HEAD | (head or {})).encode()
    return save({"request": torch.tensor(list(text), dtype=torch.uint8)} | (tensors or {"images": IMAGES}))


def png(height=2, width=2, mode="RGB"):
    stream = io.BytesIO()
    Image.new(mode, (width, height)).save(stream, "PNG")
    return torch.tensor(list(stream.getvalue()), dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 3, 3, 5, 4), (0, 3, 5, 4)])
def test_raw_tensors_arrive_bit_for_bit(dtype, shape):
    images = torch.rand(shape, dtype=torch.float64).to(dtype)
    arrived = unpack(pack(request(images), "raw"), 10**6).images
    assert arrived.dtype == dtype and torch.equal(arrived, images)


@pytest.mark.parametrize("shape", [(2, 3, 5, 4), (2, 3, 3, 5, 4), (0, 3, 5, 4)])
def test_png_arrives_within_half_a_step(shape):
    images = torch.rand(shape, dtype=torch.float64)
    arrived = unpack(pack(request(images), "png"), 10**6).images
    assert arrived.shape == images.shape and arrived.dtype == torch.float32
    assert torch.equal((arrived.double() * 255).round() / 255, (images * 255).round() / 255)
    exact = (torch.arange(256.0) / 255).reshape(1, 1, 16, 16).expand(1, 3, 16, 16)
    assert torch.equal(unpack(pack(request(exact), "png"), 10**6).images, exact)


def test_a_strided_view_is_sent_as_it_looks():
    images = torch.rand(2, 5, 4, 3).permute(0, 3, 1, 2)
    assert torch.equal(unpack(pack(request(images), "raw"), 10**6).images, images)


def test_prompts_and_metadata_arrive_as_they_are():
    prompts = ("ein Schild „Straße“", "犬 🐕")
    metadata = ({"target": "Ünïcode", "n": [1, 2.5, None]}, {})
    arrived = unpack(pack(request(torch.rand(2, 3, 2, 2), prompts, metadata), "raw"), 10**6)
    assert (arrived.id, arrived.prompts, arrived.metadata) == ("id", prompts, metadata)


@pytest.mark.parametrize(("prompt", "row"), [("p", {"x": torch.zeros(1)}), ("p", {"x": float("nan")}), ("\ud800", {})])
def test_what_is_no_json_is_not_sent(prompt, row):
    with pytest.raises(ValueError, match="cannot be sent as UTF-8 JSON"):
        pack(request(IMAGES, (prompt,), (row,)), "raw")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors file"),
        (b"\x80\x04N.", "no safetensors file"),
        (body()[:-1], "no safetensors file"),
        (save({"images": IMAGES}), "no uint8 tensor named 'request'"),
        (save({"request": torch.tensor([1, 2], dtype=torch.uint8)}), "no UTF-8 JSON"),
        (save({"request": torch.zeros(2)}), "no uint8 tensor named 'request'"),
        (body({"more": 1}), "exactly the keys"),
        (body({"id": ""}), "1 to 128 characters"),
        (body({"id": 5}), "1 to 128 characters"),
        (body({"shape": [1, 3, 2]}), r"shape \[1, 3, 2\]"),
        (body({"shape": [-1, 3, 2, 2]}), "shape"),
        (body({"shape": "abcd"}), "shape 'abcd'"),
        (body({"shape": [1, 3, 2, 3]}), r"announced as \[1, 3, 2, 3\]"),
        (body({"shape": [1, 3, 10**9, 10**9]}), "more than 1000 values"),
        (body({"prompts": []}), "1 strings and 1 objects"),
        (body({"prompts": [3]}), "1 strings and 1 objects"),
        (body({"metadata": [None]}), "1 strings and 1 objects"),
        (body(images=IMAGES + 1), "expected .0, 1."),
        (body(images=torch.full((1, 3, 2, 2), torch.nan)), "expected .0, 1."),
        (body(images=torch.zeros(1, 3, 2, 2, dtype=torch.uint8)), "expected float"),
        (body(other=IMAGES), "expected the tensor 'images', or png.0 to png.0; found .'other'"),
        (body(**{"png.0": png(3)}), "RGB of 3x2, announced as RGB of 2x2"),
        (body(**{"png.0": png(mode="RGBA")}), "it is RGBA"),
        (body(**{"png.0": png()[:30]}), "unusable PNG"),
        (body(**{"png.0": torch.zeros(8)}), "uint8 tensor"),
        (body({"shape": [1, 4, 2, 2]}, **{"png.0": png()}), "expected the tensor 'images'"),
    ],
)
def test_a_malformed_body_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        unpack(content, 1000)


def test_a_large_picture_behind_a_small_file_is_not_decoded():
    stream = io.BytesIO()
    Image.new("1", (8000, 8000)).save(stream, "PNG")
    assert len(stream.getvalue()) < 10_000
    cut = stream.getvalue()[:100]  # its pixels cannot be decoded: only the header may be looked at
    with pytest.raises(ValueError, match="unusable PNG image: it is 1 of 8000x8000, announced as RGB of 2x2"):
        decode_png(cut, 2, 2)


def test_an_answer_returns_what_was_packed():
    it = request(torch.rand(3, 3, 2, 2))
    answer = json.loads(json.dumps(pack_answer(it, [0.1, "out of memory", -3], "who")))
    assert unpack_answer(answer, it, "who") == [0.1, "out of memory", -3.0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id": "other"}, "no answer to this request"),
        ({"identity": "other"}, "no longer the one it began with"),
        ({"scores": [1.0]}, "scores: 1 for 2 samples"),
        ({"scores": [1.0, 2.0, 3.0]}, "scores: 3 for 2 samples"),
        ({"scores": 1.0}, r"scores: no list \(1.0\)"),
        ({"errors": None}, "errors: no list"),
        ({"scores": [1.0, None]}, "sample 1 has score None and error None"),
        ({"errors": [None, "why"]}, "sample 1 has score 2.0 and error 'why'"),
        ({"scores": [1.0, True]}, "sample 1 has score True"),
        ({"scores": [1.0, "2"]}, "sample 1 has score '2'"),
        ({"scores": [1.0, float("nan")]}, "sample 1 has score nan"),
        ({"scores": [1.0, 10**400]}, "sample 1 has score 1000"),
    ],
)
def test_an_unusable_answer_is_refused(change, message):
    it = request(torch.rand(2, 3, 2, 2))
    answer = {"id": "id", "identity": "who", "scores": [1.0, 2.0], "errors": [None, None]}
    assert unpack_answer(answer, it, "who") == [1.0, 2.0]
    with pytest.raises(ValueError, match=message):
        unpack_answer(answer | change, it, "who")
    with pytest.raises(ValueError, match="no answer"):
        unpack_answer([answer], it, "who")


def test_a_fingerprint_names_an_identity():
    assert fingerprint({"a": 1, "b": 2}) == fingerprint({"b": 2, "a": 1}) != fingerprint({"a": 1, "b": 3})


def test_png_files_hold_rows_and_channels_in_place():
    image = torch.zeros(3, 2, 3)
    image[0, 0, 2] = 1.0  # red, top right
    image[2, 1, 0] = 0.5  # blue, bottom left
    pixels = np.asarray(Image.open(io.BytesIO(encode_png(image))))
    assert pixels.shape == (2, 3, 3)
    assert pixels[0, 2].tolist() == [255, 0, 0] and pixels[1, 0].tolist() == [0, 0, 128]
    assert torch.equal(decode_png(encode_png(image), 2, 3)[0], image[0])
    assert data_url(image).startswith("data:image/png;base64,iVBOR")
    assert "request" in load(pack(request(image[None]), "png"))

import json

import open_clip
import pytest

from rewards.open_clip_network import make_network
from tests.rewards.tiny_clip import OPEN_CLIP


def test_a_file_in_open_clips_format(tmp_path):
    text = OPEN_CLIP["text_cfg"] | {"context_length": 12}
    (tmp_path / "tiny.json").write_text(json.dumps(OPEN_CLIP | {"text_cfg": text}))
    network, tokenizer = make_network(str(tmp_path / "tiny.json"))
    assert isinstance(network, open_clip.CLIP)
    tokens = tokenizer(["a photo of a red car", "word " * 50])
    assert tokens.shape == (2, 12)
    assert network.encode_text(tokens).shape == (2, 8)


def test_an_architecture_that_is_nowhere():
    with pytest.raises(
        ValueError, match="architecture='ViT-Q': neither a model of open_clip, such as ViT-L-14, nor a file"
    ):
        make_network("ViT-Q")

"""Our HPSv2 against ``hpsv2`` 1.2.0 itself, from picture and prompt to score. The package belongs in an environment of its
own; ``hpsv2_package.sh`` makes one and runs this file in it."""

import importlib.util
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from rewards.hpsv2 import HPSv2
from rewards.images import as_batch
from tests.rewards.tiny_clip import SIDE, pictures, write_hpsv2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("hpsv2") is None,
    reason="needs hpsv2 in an environment of its own: run `bash tests/parity/hpsv2_package.sh`",
)
SIZES = [(64, 64), (SIDE, SIDE), (9, 9), (48, 32), (21, 40), (100, 30), (512, 384), (13, 9)]
PROMPTS = [
    "a red circle",
    "Two  BLUE squares, left of a ring; isn't it?",
    "café &amp; naïve “quotes” 你好 🎨",
    "a very long description of a crowded market at dusk, " * 12,
    "",
]


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The package's scoring module with a small network where it keeps its ViT-H-14, and that network's files."""
    monkeypatch.setitem(sys.modules, "turtle", SimpleNamespace(forward=None))  # imported, never used; needs a display
    from hpsv2 import img_score
    from hpsv2.src import open_clip

    checkpoint, architecture = write_hpsv2(tmp_path)
    open_clip.add_model_config(architecture)
    network, _, preprocess = open_clip.create_model_and_transforms(
        architecture.stem, None, precision="amp", device="cpu", light_augmentation=True, output_dict=True
    )
    monkeypatch.setattr(img_score, "device", "cpu")
    monkeypatch.setattr(img_score, "model_dict", {"model": network, "preprocess_val": preprocess})
    return img_score, checkpoint, architecture


@pytest.mark.filterwarnings("ignore")
def test_every_picture_and_prompt_scores_as_in_the_package(package):
    img_score, checkpoint, architecture = package
    ours = HPSv2(version="v2.1", weights=str(checkpoint), architecture=str(architecture))
    shown, table = pictures(*SIZES), []
    for prompt in PROMPTS:
        theirs = np.array(img_score.score(shown, prompt, cp=str(checkpoint), hps_version="v2.1"), dtype=np.float64)
        mine = np.array([ours(as_batch(picture), [prompt], [{}]).item() for picture in shown])
        table.append((theirs, mine))
    theirs, mine = (np.stack(side) for side in zip(*table, strict=True))
    print(
        f"\n{mine.size} scores from {theirs.min():.4f} to {theirs.max():.4f}: differ by at most {abs(theirs - mine).max():.1e}"
    )
    assert theirs.std(0).min() > 1e-3 and theirs.std(1).min() > 1e-3  # pictures and prompts both matter
    assert abs(theirs - mine).max() < 1e-5

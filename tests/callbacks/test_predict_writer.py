import json

import numpy as np
import pytest
import torch
from PIL import Image

from callbacks.predict_writer import PredictWriter
from tests.callbacks.miniature import PROMPTS, ByPrompt, MeanPixel, make_module


def test_every_image_is_written_and_indexed(make_trainer, make_data, tmp_path):
    module, data = make_module(), make_data()
    trainer = make_trainer(PredictWriter({"mean": MeanPixel()}))
    assert not trainer.predict(module, datamodule=data)
    folder = tmp_path / "run" / "predictions"
    entries = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert [entry["file"] for entry in entries] == [f"{p:05d}_{i}.png" for p in range(6) for i in range(2)]
    assert [entry["prompt"] for entry in entries] == [row["prompt"] for row in PROMPTS for _ in range(2)]
    assert {entry["seed"] for entry in entries} == {0}
    images = torch.cat([module.predict_step(batch, 0).images for batch in data.predict_dataloader()])
    for entry, image in zip(entries, images, strict=True):
        pixels = np.asarray(Image.open(folder / entry["file"]))
        assert pixels.shape == (4, 4, 3)
        assert np.abs(pixels / 255 - image.permute(1, 2, 0).numpy()).max() <= 0.5 / 255 + 1e-6
        assert abs(entry["scores"]["mean"] - image.double().mean().item()) < 1e-6
    assert sorted(path.name for path in folder.iterdir()) == sorted(
        [e["file"] for e in entries] + ["predictions.jsonl"]
    )


def test_without_rewards_there_are_no_scores(make_trainer, make_data, tmp_path):
    data = make_data(prompts=[{"prompt": "größer"}], images_per_prompt=1)
    make_trainer(PredictWriter()).predict(make_module(), datamodule=data)
    text = (tmp_path / "run" / "predictions" / "predictions.jsonl").read_text(encoding="utf-8")
    assert "größer" in text
    assert json.loads(text) == {
        "prompt": "größer", "file": "00000_0.png", "prompt_index": 0, "image_index": 0, "seed": 0,
    }  # fmt: skip


def test_an_image_that_a_reward_cannot_judge_is_still_written(make_trainer, make_data, tmp_path):
    data = make_data(prompts=[{"prompt": "known"}, {"prompt": "plain"}], images_per_prompt=1)
    reward = ByPrompt({"plain": KeyError("include")}, default=0.5)
    with pytest.warns(UserWarning, match=r"reward 'judge' failed in the prediction on prompt 'plain'.*no score"):
        make_trainer(PredictWriter({"judge": reward})).predict(make_module(), datamodule=data)
    folder = tmp_path / "run" / "predictions"
    entries = [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]
    assert [entry["scores"] for entry in entries] == [{"judge": 0.5}, {"judge": None}]
    assert all((folder / entry["file"]).is_file() for entry in entries)

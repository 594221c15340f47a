"""Write the images of ``predict`` as PNG files with an index of what they are."""

from __future__ import annotations

import json
from typing import Any

from lightning.pytorch import Callback, Trainer

from callbacks.grid_image import to_pictures
from callbacks.run_folder import replacing, run_folder
from callbacks.scoring import check_rewards, score
from datamodules.eval_batch import EvalBatch
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.types import Samples
from rewards.base import Reward

INDEX = "predictions.jsonl"


class PredictWriter(Callback):
    """``<run>/predictions/<prompt>_<image>.png`` and ``predictions.jsonl``, one line an image: ``prompt``, ``file``,
    ``prompt_index``, ``image_index``, ``seed`` (of the noise) and, with rewards, ``scores``. The index is rewritten by a
    new ``predict`` into the same folder. Of a video the middle frame is written. The Trainer then returns no predictions,
    so that memory does not grow with their number.

    Args:
        rewards: by name, to score the images with; ``None`` for no scores. A reward that fails stops the run.
    """

    def __init__(self, rewards: dict[str, Reward] | None = None) -> None:
        self.rewards = {} if rewards is None else check_rewards(rewards)
        self._lines: list[str] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._lines = []
        trainer.predict_loop.return_predictions = False

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LeanGRPO,
        outputs: Samples,
        batch: EvalBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        scores = {n: score(r, outputs, name=n, when="the prediction") for n, r in self.rewards.items()}
        for i, picture in enumerate(to_pictures(outputs.images)):
            prompt, image = int(outputs.rows.prompt[i]), int(outputs.rows.generation[i])
            file = f"{prompt:05d}_{image}.png"
            with replacing(run_folder(trainer) / "predictions" / file) as temporary:
                picture.save(temporary)
            entry: dict[str, Any] = {
                "prompt": outputs.prompts[i],
                "file": file,
                "prompt_index": prompt,
                "image_index": image,
                "seed": pl_module.eval_seed,
            }
            if scores:
                entry["scores"] = {name: values[i].item() for name, values in scores.items()}
            self._lines.append(json.dumps(entry, ensure_ascii=False))

    def on_predict_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        folder = run_folder(trainer) / "predictions"
        with replacing(folder / INDEX) as temporary:
            temporary.write_text("".join(line + "\n" for line in self._lines), encoding="utf-8")
        print(f"{len(self._lines)} images in {folder}")

"""Write the images of ``predict`` as PNG files with an index of what they are."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from callbacks.grid_image import to_pictures
from callbacks.run_folder import finite, replacing, run_folder
from callbacks.scoring import attempt, check_rewards, describe
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
        rewards: by name, to score the images with; ``None`` for no scores. Where a reward fails, for instance on a
            prompt of a plain text file without the metadata that it judges by, the score is null and a warning says why.
    """

    def __init__(self, rewards: dict[str, Reward] | None = None) -> None:
        self.rewards = {} if rewards is None else check_rewards(rewards)
        self._lines: list[tuple[int, int, str]] = []
        self._folder = Path()

    def on_predict_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._lines = []
        self._folder = Path(trainer.strategy.broadcast(str(run_folder(trainer)))) / "predictions"  # the first rank's
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
        if not len(outputs):
            return
        scores = {name: _score(name, reward, outputs) for name, reward in self.rewards.items()}
        for i, picture in enumerate(to_pictures(outputs.images)):
            prompt, image = int(outputs.rows.prompt[i]), int(outputs.rows.generation[i])
            file = f"{prompt:05d}_{image}.png"
            with replacing(self._folder / file) as temporary:
                picture.save(temporary)
            entry: dict[str, Any] = {
                "prompt": outputs.prompts[i],
                "file": file,
                "prompt_index": prompt,
                "image_index": image,
                "seed": pl_module.eval_seed,
            }
            if scores:
                entry["scores"] = finite({name: values[i].item() for name, values in scores.items()})
            self._lines.append((prompt, image, json.dumps(entry, ensure_ascii=False)))

    def on_predict_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._lines = sorted(line for lines in pl_module.ranks.gather(self._lines) for line in lines)
        if not trainer.is_global_zero:
            return
        with replacing(self._folder / INDEX) as temporary:
            temporary.write_text("".join(line + "\n" for _, _, line in self._lines), encoding="utf-8")
        print(f"{len(self._lines)} images in {self._folder}")


def _score(name: str, reward: Reward, samples: Samples) -> Tensor:
    """``[N]``, NaN where the reward fails: the images are what was asked for, and they are good without a score."""
    scores, faults = attempt(reward, samples)
    if faults:
        warnings.warn(f"{describe(faults[0], samples, name=name, when='the prediction')}; no score there", stacklevel=2)
    return scores

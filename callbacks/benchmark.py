"""The frame of every benchmark: draw a prompt file in full, score it, and write down numbers that can be compared.

Images come from the module's deterministic sampler under settings of the benchmark's own, with noise keyed by (seed, prompt,
image), and with averaged weights where an EMA keeps some. They are rounded to 8 bits, as in their PNG files, before they are
scored. Batches are cut before they are dealt to the ranks, so 1, 2 and 4 processes compute the same numbers from the same
batches and write the same files. In ``fit`` training is left bitwise as it was.

A benchmark writes ``<run>/evaluations/<name>/iteration_<n>/``::

    result.json            everything (callbacks.results)
    results.jsonl          one line an image
    best_median_worst.png  samples by score
    images/                PNG

The folder appears when it is complete; an evaluation that was broken off leaves none, and starts over when it is run again, or
the run resumed.
"""

from __future__ import annotations

import json
import shutil
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from callbacks.estimates import Evaluation, Measure, Tally
from callbacks.grid_image import to_pictures
from callbacks.held_out import undisturbed
from callbacks.lookup import every_callback
from callbacks.progress import say
from callbacks.publish import log_same_on_all, publish
from callbacks.ranking_image import draw_ranking
from callbacks.results import FILE, FORMAT, Result, digest, file_sha256, metrics_of, result_folder, writing
from callbacks.run_folder import run_folder, write_json
from callbacks.versions import versions
from datamodules.eval_batch import EvalLoader
from datamodules.prompts import Prompt, load_prompts
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.types import DrawingSettings, PromptBatch, Samples
from rewards.base import Reward
from rewards.images import eight_bit

Line = dict[str, Any]
"""One image in ``results.jsonl``."""
IMAGES, LINES, PICTURE = "images", "results.jsonl", "best_median_worst.png"
SECONDS_BETWEEN_LINES = 30.0


class Benchmark(Callback, ABC):
    """Runs in ``fit`` before, during and after training, and in ``validate`` and ``test``, whose own prompts it leaves
    alone. Logged: the headline as ``eval/<name>``, the other metrics as ``eval/<name>/<metric>``, each with ``_stderr``. List
    it after an EMA.

    Args:
        name: of the folder and the metrics; of several benchmarks in a run each has another.
        prompts: prompt file, ``.txt`` or ``.jsonl``; of a benchmark with prompts of its own also the folder that
            ``python -m datamodules.prepare`` wrote them to.
        images_per_prompt: at least 1.
        sampler: steps, guidance and size of the images; ``None``: the module's own.
        batch_size: images drawn and scored at a time; of several ranks each takes whole batches.
        seed: key of the noise.
        every: in ``fit``, evaluate after every so many iterations; 0 = never.
        before, after: in ``fit``, evaluate before the first and after the last iteration.
        keep_images: leave the PNG files in place.

    Errors: ``ValueError`` on unusable arguments; before any work, on unreadable prompts, missing weights of rewards, and
    settings that the policy cannot follow; later, on scores that are not finite and on what cannot be written.
    """

    category: str = "tag"
    """Key of a prompt's metadata by which prompts are told apart."""
    prepared: ClassVar[tuple[str, str] | None] = None
    """What the benchmark's own prompts are called by ``datamodules.prepare``: the set and its file."""

    def __init__(
        self,
        *,
        name: str,
        prompts: str,
        images_per_prompt: int,
        sampler: DrawingSettings | None,
        batch_size: int,
        seed: int,
        every: int,
        before: bool,
        after: bool,
        keep_images: bool,
    ) -> None:
        for what, value, least in (
            ("images_per_prompt", images_per_prompt, 1),
            ("batch_size", batch_size, 1),
            ("every", every, 0),
        ):
            if value < least:
                raise ValueError(f"{what}={value}: give an integer of at least {least}")
        if not is_folder_name(name):
            raise ValueError(f"name={name!r}: it names a folder; give a word without slashes")
        self.name, self.prompts, self.images_per_prompt = name, prompts, images_per_prompt
        self.sampler, self.batch_size, self.seed = sampler, batch_size, seed
        self.every, self.before, self.after, self.keep_images = every, before, after, keep_images
        self.first: Evaluation | None = None
        """The first evaluation in ``fit``; restored on resume, while settings stay the same."""
        self.last: Evaluation | None = None
        """The newest evaluation."""
        self.seconds = 0.0
        """Wall-clock time spent evaluating in ``fit``, resumed parts included."""
        self._settings: dict[str, Any] | None = None
        self._chosen: list[Prompt] = []
        self._ran = False

    # what a benchmark says of itself

    @property
    @abstractmethod
    def scorers(self) -> dict[str, Reward]:
        """Whatever scores, by name."""

    @abstractmethod
    def assess(self, samples: Samples, files: Sequence[str], when: str) -> tuple[dict[str, Tensor], list[Line]]:
        """Scores ``[N]`` by name, all finite, and the lines of ``results.jsonl``, for N samples in ``files``."""

    @abstractmethod
    def measures(self, evaluation: Evaluation) -> dict[str, Measure]:
        """The metrics by name; the first one is the headline."""

    def choose(self, prompts: list[Prompt]) -> list[Prompt]:
        """The prompts to draw. Errors: ``ValueError`` if they are not the benchmark's."""
        return prompts

    def other(self, evaluation: Evaluation, lines: Sequence[Line]) -> dict[str, Any]:
        """Plain numbers that are no means over prompts."""
        return {}

    def identities(self) -> dict[str, Any]:
        """What made the scores."""
        return {name: scorer.identity() for name, scorer in self.scorers.items()}

    def place(self, prompt_index: int, image_index: int) -> Path:
        """Where an image lies under ``images/``."""
        return Path(f"{prompt_index:05d}_{image_index}.png")

    def accompany(self, folder: Path, prompt_index: int) -> None:
        """Write what lies beside the images of a prompt; ``folder`` is ``images/``."""

    def ranking(self, evaluation: Evaluation) -> str:
        """The score by which the picture's samples are ordered."""
        return self.headline(evaluation)[1].reward

    def headline(self, evaluation: Evaluation) -> tuple[str, Measure]:
        """The metric that the benchmark is read by."""
        return next(iter(self.measures(evaluation).items()))

    @property
    def state_key(self) -> str:
        """Under which a checkpoint keeps the state: several benchmarks of one class differ by name."""
        return self._generate_state_key(name=self.name)

    # when

    def setup(self, trainer: Trainer, pl_module: LeanGRPO, stage: str) -> None:
        if stage == "predict" or (stage == "fit" and not (self.every or self.before or self.after)):
            return
        self._ran = False
        if any(other.name == self.name and other is not self for other in every_callback(trainer, Benchmark)):
            raise ValueError(f"two benchmarks are named {self.name!r} and would write to one folder: rename one")
        self._chosen = self.choose(self._load_prompts())
        pl_module.sampler(self.sampler)
        for scorer in self.scorers.values():
            scorer.load()

    def on_train_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        if not self._chosen:
            return
        settings = self._current(pl_module)
        if self.first is not None and settings != self._settings:
            warnings.warn(
                f"benchmark {self.name!r} has other settings than when this run began, so there is no change to report: "
                "evaluate both checkpoints by `validate` instead",
                stacklevel=2,
            )
            self.first = self.last = None
        elif self.first is None and self.before:
            self.first = self._evaluate(trainer, pl_module)
        elif self._due(pl_module):  # it was broken off, and the run resumed
            self._evaluate(trainer, pl_module)
        self._settings = settings

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        if self._due(pl_module):
            self._evaluate(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        if self.after and (self.last is None or self.last.iteration != pl_module.iteration):
            self._evaluate(trainer, pl_module)

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._evaluate_alone(trainer, pl_module)

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._evaluate_alone(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LeanGRPO, stage: str) -> None:
        if stage in ("validate", "test") and not self._ran:
            warnings.warn(
                f"benchmark {self.name!r} did not run, since `{stage}` had nothing to draw: set its data file, and "
                f"trainer.limit_{'val' if stage == 'validate' else 'test'}_batches to at least 1",
                stacklevel=2,
            )

    def state_dict(self) -> dict[str, Any]:
        first, last = (None if e is None else e.state_dict() for e in (self.first, self.last))
        return {"first": first, "last": last, "settings": self._settings, "seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.first, self.last = (
            None if state_dict[name] is None else Evaluation.from_state_dict(state_dict[name])
            for name in ("first", "last")
        )
        self._settings, self.seconds = state_dict["settings"], state_dict["seconds"]

    # how

    def _due(self, pl_module: LeanGRPO) -> bool:
        now = pl_module.iteration
        evaluated = self.last is not None and self.last.iteration == now
        return self.every > 0 and now > 0 and now % self.every == 0 and not evaluated

    def _load_prompts(self) -> list[Prompt]:
        if self.prepared is None or Path(self.prompts).suffix:
            return load_prompts(self.prompts)
        name, file = self.prepared
        try:
            return load_prompts(Path(self.prompts) / file)
        except ValueError as error:
            get = f"python -m datamodules.prepare {name} --to {self.prompts}"
            raise ValueError(f"{error}; or get the benchmark's prompts by `{get}`") from error

    def _evaluate_alone(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            return
        self._ran = True
        evaluation = self._measure(trainer, pl_module)
        log_same_on_all(pl_module, self._scalars(evaluation))

    def _evaluate(self, trainer: Trainer, pl_module: LeanGRPO) -> Evaluation:
        start = time.perf_counter()
        evaluation = self._measure(trainer, pl_module)
        publish(trainer, pl_module, self._scalars(evaluation))
        self.seconds += time.perf_counter() - start
        return evaluation

    def _measure(self, trainer: Trainer, pl_module: LeanGRPO) -> Evaluation:
        when, ranks = f"benchmark {self.name!r} at iteration {pl_module.iteration}", pl_module.ranks
        images = len(self._chosen) * self.images_per_prompt
        say(f"{when}: {len(self._chosen)} prompts x {self.images_per_prompt} images ...")
        target = run_folder(trainer) / "evaluations" / self.name / f"iteration_{pl_module.iteration:06d}"
        with undisturbed(pl_module), result_folder(target, ranks, when) as folder:
            try:
                parts = ranks.share(lambda: self._draw_all(trainer, pl_module, folder, when), when)
            finally:
                for scorer in self.scorers.values():
                    scorer.to("cpu")
            tally = Tally.joined([part for part, _ in parts])
            lines = [line for _, line in sorted((pair for _, mine in parts for pair in mine), key=lambda pair: pair[0])]
            assert len(lines) == images, f"{len(lines)} of {images} images"
            table, model = tally.table(), pl_module.identity()
            evaluation = Evaluation.of(table, pl_module.iteration)

            def write() -> None:
                with writing(target):
                    result = self._result(trainer, pl_module, evaluation, lines, model) | {"prompts": table}
                    self._write(trainer, folder, result, lines, self.ranking(evaluation))

            ranks.share(lambda: write() if trainer.is_global_zero else None, when)
        name, measure = self.headline(evaluation)
        result = evaluation.measure(measure)
        say(f"{self.name} {name} {result.mean:.3f} +- {result.stderr:.3f} ({images} images; {target})")
        self.last = evaluation
        return evaluation

    def _draw_all(
        self, trainer: Trainer, pl_module: LeanGRPO, folder: Path, when: str
    ) -> tuple[Tally, list[tuple[tuple[int, int], Line]]]:
        """This rank's scores and lines, with their (prompt, image). Where weights are sharded the other ranks wait for this
        one's policy calls, so a failure is raised at the end."""
        ranks, tally, lines, failure = pl_module.ranks, Tally(self.category), [], None
        batches = EvalLoader(
            self._chosen, self.images_per_prompt, self.batch_size, rank=ranks.rank, ranks=ranks.size, whole_batches=True
        )
        told = time.perf_counter()
        for number, batch in enumerate(batches):
            with trainer.precision_plugin.test_step_context():
                samples = pl_module.draw(batch, self.sampler, self.seed)
            if not len(samples) or failure is not None:
                continue
            try:
                lines += self._keep(tally, replace(samples, images=eight_bit(samples.images) / 255), folder, when)
            except Exception as error:
                if ranks.size == 1:
                    raise
                failure = error
            if time.perf_counter() - told > SECONDS_BETWEEN_LINES:
                told = time.perf_counter()
                say(f"{when}: {number + 1} of {len(batches)} batches")
        if failure is not None:
            raise failure
        return tally, lines

    def _keep(
        self, tally: Tally, samples: Samples, folder: Path, when: str
    ) -> list[tuple[tuple[int, int], Line]]:  # fmt: skip
        """Score and save some samples -> their lines."""
        ids = list(zip(samples.rows.prompt.tolist(), samples.rows.generation.tolist(), strict=True))
        files = [Path(IMAGES) / self.place(*key) for key in ids]
        scores, lines = self.assess(samples, [file.as_posix() for file in files], when)
        tally.add(samples, scores)
        for (prompt, image), file, picture in zip(ids, files, to_pictures(samples.images), strict=True):
            with writing(folder / file):
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                picture.save(folder / file)
                if image == 0:
                    self.accompany(folder / IMAGES, prompt)
        return list(zip(ids, lines, strict=True))

    def _current(self, pl_module: LeanGRPO) -> dict[str, Any]:
        """What two results must share to be compared, as plain values."""
        count = len(self._chosen)
        settings = {
            "benchmark": type(self).__name__,
            "prompts": {
                "sha256": digest(self._chosen),
                "category": self.category,
                "number": count,
                "images_per_prompt": self.images_per_prompt,
                "images": count * self.images_per_prompt,
            },
            "sampler": pl_module.sampler(self.sampler),
            "noise": {"seed": self.seed, "key": "seed, prompt's index, image's index"},
            "pixels": "8 bits per channel",
            "rewards": self.identities(),
        }
        return json.loads(json.dumps(settings))  # tuples are lists in a file

    def _result(
        self,
        trainer: Trainer,
        pl_module: LeanGRPO,
        evaluation: Evaluation,
        lines: Sequence[Line],
        model: dict[str, Any],
    ) -> Result:
        path = trainer.ckpt_path if trainer.state.fn != TrainerFn.FITTING else None
        return {
            "format": FORMAT,
            "name": self.name,
            "metrics": metrics_of(evaluation, self.measures(evaluation)),
            "other": self.other(evaluation, lines),
            "settings": self._current(pl_module),
            "model": model,
            "checkpoint": None if path is None else {"path": str(path), "sha256": file_sha256(path)},
            "prompts_file": str(self.prompts),
            "batch_size": self.batch_size,
            "device": _device_name(pl_module.device),
            "versions": versions(),
        }

    def _write(self, trainer: Trainer, folder: Path, result: Result, lines: Sequence[Line], ranking: str) -> None:
        write_json(folder / FILE, result)
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (folder / LINES).write_text(text, encoding="utf-8")
        title = f"{self.name}, iteration {result['model']['iteration']}: samples by {ranking}"
        picture = draw_ranking(result["prompts"], ranking, lambda *key: folder / IMAGES / self.place(*key), title)
        picture.save(folder / PICTURE)
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger) and trainer.state.fn == TrainerFn.FITTING:
                step = result["model"]["iteration"]
                logger.experiment.add_image(f"eval/{self.name}", np.asarray(picture), step, dataformats="HWC")
        if not self.keep_images:
            shutil.rmtree(folder / IMAGES)

    def _scalars(self, evaluation: Evaluation) -> dict[str, float]:
        (_, headline), *others = self.measures(evaluation).items()
        named = {f"eval/{self.name}": headline} | {f"eval/{self.name}/{name}": measure for name, measure in others}
        results = {name: evaluation.measure(measure) for name, measure in named.items()}
        return {name: result.mean for name, result in results.items()} | {
            f"{name}_stderr": result.stderr for name, result in results.items()
        }


def is_folder_name(name: str) -> bool:
    """Whether ``name`` is one step down from a folder, and not up or away."""
    return name not in ("", "..") and Path(name).name == name and "\0" not in name


def by_category(evaluation: Evaluation, reward: str) -> Mapping[str, Measure]:
    """The mean of a reward in each category, by the category's name."""
    return {tag: Measure(reward=reward, tag=tag) for tag in evaluation.categories}


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

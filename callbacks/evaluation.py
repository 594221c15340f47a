"""The held-out evaluation: what training is judged by.

In ``fit`` the datamodule's test set is drawn and scored before and after training, in ``validate`` and ``test`` the
Trainer's own loop draws it; all go through the same collection and statistics (:mod:`callbacks.estimates`). Images come
from the module's deterministic sampler with noise keyed by (prompt, image), so before and after are pairs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable
from typing import Any

from lightning.pytorch import Callback, Trainer
from lightning.pytorch.trainer.states import TrainerFn

from callbacks.estimates import Evaluation, Tally
from callbacks.held_out import draw_samples, held_out_batches, undisturbed, validation_batches
from callbacks.progress import say
from callbacks.publish import log_same_on_all, publish
from callbacks.scoring import check_rewards, score
from datamodules.eval_batch import EvalBatch
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.types import PromptBatch, Samples
from rewards.base import Reward


class HeldOutEvaluation(Callback):
    """Mean held-out rewards with standard errors clustered by prompt, per category, before and after training.

    Logged: ``held_out/<reward>`` (test set, in ``fit``), ``val/<reward>``, ``test/<reward>``, each with ``_stderr`` and
    per category. Training is left bitwise as it was. A reward that fails stops the run: no sample is dropped.

    Args:
        rewards: by name.
        main: name of the reward that the run is judged by.
        every: in ``fit``, also evaluate the validation set after every so many iterations; 0 = never.

    Errors: ``ValueError`` on unusable arguments, without a test set in ``fit``, or if a reward fails.
    """

    def __init__(self, rewards: dict[str, Reward], main: str, every: int = 0) -> None:
        self.rewards = check_rewards(rewards)
        if main not in self.rewards:
            raise ValueError(f"main={main!r} is none of the rewards: choose one of {sorted(self.rewards)}")
        if every < 0:
            raise ValueError(f"every={every}: give a number of iterations, or 0 for none")
        self.main, self.every = main, every
        self.before: Evaluation | None = None
        """Of the test set as training began; restored on resume."""
        self.after: Evaluation | None = None
        """Of the test set as training ended."""
        self.seconds = 0.0
        """Wall-clock time spent evaluating in ``fit``, resumed parts included."""
        self._validated = 0
        self._begin()

    # fit

    def on_train_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        if self.every:
            validation_batches(trainer)  # fail now rather than in the middle of training
        self.after = None
        if self.before is None:
            self.before = self._evaluate(trainer, pl_module, held_out_batches(trainer), "held_out")
        self._validate_if_due(trainer, pl_module)  # one that was broken off, where the run is resumed

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: PromptBatch, batch_idx: int
    ) -> None:
        self._validate_if_due(trainer, pl_module)

    def _validate_if_due(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        now = pl_module.iteration
        if self.every and now % self.every == 0 and now != self._validated:
            self._evaluate(trainer, pl_module, validation_batches(trainer), "val")
            self._validated = now

    def on_train_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self.after = self._evaluate(trainer, pl_module, held_out_batches(trainer), "held_out")
        if self.before is not None and not self.after.comparable(self.before):
            warnings.warn(
                "the test set or the evaluation's rewards are not those this run began with, so there is no change to "
                "report: evaluate both checkpoints by `test` instead",
                stacklevel=2,
            )
            self.before = None

    def _evaluate(self, trainer: Trainer, pl_module: LeanGRPO, batches: Iterable[EvalBatch], name: str) -> Evaluation:
        start, tally = time.perf_counter(), Tally()
        say(f"evaluating {name} prompts at iteration {pl_module.iteration} ...")
        when = f"the held-out evaluation at iteration {pl_module.iteration}"

        def draw_and_score() -> Tally:
            failure = None
            with undisturbed(pl_module):
                for samples in draw_samples(trainer, pl_module, batches):
                    failure = failure or self._failure_in(pl_module, tally, samples, when)
            return _unless(failure, tally)

        evaluation = Tally.joined(pl_module.ranks.share(draw_and_score, when)).evaluation(pl_module.iteration)
        publish(trainer, pl_module, evaluation.scalars(name))
        self.seconds += time.perf_counter() - start
        result = evaluation.estimate(self.main)
        say(f"{name} {self.main} {result.mean:.3f} +- {result.stderr:.3f} ({len(evaluation.prompts)} prompts)")
        return evaluation

    def _failure_in(self, pl_module: LeanGRPO, tally: Tally, samples: Samples, when: str) -> Exception | None:
        """Score some samples. A failure is raised; of several ranks it is returned, to be raised once all is drawn: where
        weights are sharded the others wait for this rank's policy calls."""
        try:
            tally.add(
                samples, {name: score(reward, samples, name=name, when=when) for name, reward in self.rewards.items()}
            )
        except Exception as error:
            if pl_module.ranks.size == 1:
                raise
            return error
        return None

    def state_dict(self) -> dict[str, Any]:
        before = None if self.before is None else self.before.state_dict()
        return {"before": before, "seconds": self.seconds, "validated": self._validated}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        before = state_dict["before"]
        self.before = None if before is None else Evaluation.from_state_dict(before)
        self.seconds, self._validated = state_dict["seconds"], state_dict.get("validated", 0)

    # validate and test: the Trainer's loop draws

    def _begin(self) -> None:
        self._tally, self._failure = Tally(), None

    def _collect(self, pl_module: LeanGRPO, samples: Samples, when: str) -> None:
        if len(samples) and self._failure is None:
            with undisturbed(pl_module):
                self._failure = self._failure_in(pl_module, self._tally, samples, when)

    def _finish(self, trainer: Trainer, pl_module: LeanGRPO, name: str) -> None:
        tally = Tally.joined(pl_module.ranks.share(lambda: _unless(self._failure, self._tally), f"the {name} set"))
        if len(tally):
            evaluation = tally.evaluation(pl_module.iteration)
            fitting = trainer.state.fn == TrainerFn.FITTING
            if fitting:
                publish(trainer, pl_module, evaluation.scalars(name))
            log_same_on_all(pl_module, evaluation.scalars(name), logger=not fitting)
        self._begin()

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._begin()

    def on_validation_batch_end(
        self,
        trainer: Trainer,
        pl_module: LeanGRPO,
        outputs: Samples,
        batch: EvalBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if not trainer.sanity_checking:
            self._collect(pl_module, outputs, "validation")

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._finish(trainer, pl_module, "val")

    def on_test_epoch_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._begin()

    def on_test_batch_end(
        self,
        trainer: Trainer,
        pl_module: LeanGRPO,
        outputs: Samples,
        batch: EvalBatch,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        self._collect(pl_module, outputs, "the test")

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
        self._finish(trainer, pl_module, "test")


def _unless(failure: Exception | None, tally: Tally) -> Tally:
    if failure is not None:
        raise failure
    return tally

import json

import pytest
import torch

from callbacks.best_checkpoint import BestCheckpoint
from callbacks.checkpoint import IterationCheckpoint
from callbacks.evaluation import HeldOutEvaluation
from callbacks.prompt_set_evaluation import PromptSetEvaluation
from callbacks.publish import publish
from callbacks.reward_scoring import RewardScoring
from tests.callbacks.miniature import MeanPixel, make_module

METRIC = "eval/x"


class Evaluates(RewardScoring):
    """Measures what it is told to, by iteration."""

    def __init__(self, values, metric=METRIC):
        super().__init__({"mean": MeanPixel()})
        self.values, self.metric = values, metric

    def _measure(self, trainer, pl_module):
        if pl_module.iteration in self.values:
            publish(trainer, pl_module, {self.metric: self.values[pl_module.iteration]})

    def on_train_start(self, trainer, pl_module):
        if pl_module.iteration == 0:
            self._measure(trainer, pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        self._measure(trainer, pl_module)


def run(
    make_trainer, make_data, values, iterations=4, ckpt_path=None, folder=None, mode="max", metric=METRIC, **changes
):
    best = BestCheckpoint(metric, mode)
    if folder is not None:
        from lightning.pytorch.loggers import CSVLogger

        changes["logger"] = CSVLogger(folder, name="", version="")

    callbacks = Evaluates(values), best, IterationCheckpoint(every=1, keep=9)
    trainer = make_trainer(*callbacks, enable_checkpointing=True, **changes)
    trainer.fit(make_module(), datamodule=make_data(iterations=iterations), ckpt_path=ckpt_path)
    return best


def on_disk(folder):
    saved = torch.load(folder / "checkpoints" / "best.ckpt", weights_only=True)
    return saved["lean_grpo"]["iteration"], json.loads((folder / "checkpoints" / "best.json").read_text())


@pytest.mark.parametrize(
    ("values", "mode", "iteration"),
    [
        ({1: 0.1, 2: 0.5, 3: 0.3}, "max", 2),
        ({1: 0.1, 2: 0.5, 3: 0.05}, "min", 3),
        ({2: 0.5, 4: 0.5}, "max", 2),  # of equal ones the earliest
        ({1: float("nan"), 3: -2.0}, "max", 3),
        ({0: 0.2, 1: 0.1, 3: 0.3}, "max", 3),
    ],
)
def test_the_best_is_kept(make_trainer, make_data, tmp_path, values, mode, iteration):
    best = run(make_trainer, make_data, values, mode=mode)
    record = {"metric": METRIC, "value": values[iteration], "iteration": iteration}
    assert on_disk(tmp_path / "run") == (iteration, record)
    assert (best.value, best.iteration, best.path) == (
        values[iteration],
        iteration,
        tmp_path / "run/checkpoints/best.ckpt",
    )


def test_it_is_a_whole_checkpoint_of_that_iteration(make_trainer, make_data, tmp_path):
    run(make_trainer, make_data, {2: 1.0, 3: 0.0})
    folder = tmp_path / "run" / "checkpoints"
    best, same = (torch.load(folder / name, weights_only=True) for name in ("best.ckpt", "iteration_000002.ckpt"))
    assert all(torch.equal(best["state_dict"][k], same["state_dict"][k]) for k in same["state_dict"])
    trainer = make_trainer(RewardScoring({"mean": MeanPixel()}))
    module = make_module()
    trainer.fit(module, datamodule=make_data(iterations=4), ckpt_path=folder / "best.ckpt")
    assert module.iteration == 4


def test_a_policy_that_was_best_before_training_has_no_best_checkpoint(make_trainer, make_data, tmp_path):
    best = run(make_trainer, make_data, {0: 0.9, 2: 0.5})
    assert (best.value, best.iteration, best.path) == (0.9, 0, None)
    assert not (tmp_path / "run" / "checkpoints" / "best.ckpt").exists()


def test_a_resumed_run_goes_on_from_it(make_trainer, make_data, tmp_path):
    """In a folder of its own, as train.py gives each run: with the best of before, until it is beaten."""
    run(make_trainer, make_data, {1: 0.5, 2: 0.1}, iterations=2)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    second = run(make_trainer, make_data, {3: 0.4}, 3, last, tmp_path / "second")
    assert on_disk(tmp_path / "second") == (1, {"metric": METRIC, "value": 0.5, "iteration": 1})
    assert second.path == tmp_path / "second" / "checkpoints" / "best.ckpt"
    run(
        make_trainer,
        make_data,
        {3: 0.4, 4: 0.6},
        4,
        tmp_path / "second" / "checkpoints" / "last.ckpt",
        tmp_path / "third",
    )
    assert on_disk(tmp_path / "third")[0] == 4
    assert on_disk(tmp_path / "second")[0] == 1


def test_a_best_that_is_gone_or_replaced_is_not_claimed(make_trainer, make_data, tmp_path):
    """The run goes on from its first checkpoint, after which it had found a better one."""
    run(make_trainer, make_data, {1: 0.5, 3: 0.9})
    first = tmp_path / "run" / "checkpoints" / "iteration_000001.ckpt"
    with pytest.warns(UserWarning, match="gone, or the run went on and replaced it"):
        run(make_trainer, make_data, {2: 0.2}, 2, first, tmp_path / "second")
    assert on_disk(tmp_path / "second") == (2, {"metric": METRIC, "value": 0.2, "iteration": 2})


def test_by_a_benchmark_and_by_held_out_rewards(make_trainer, make_data, tmp_path):
    prompts = make_data().files["train"]
    benchmark = PromptSetEvaluation(
        name="set", prompts=prompts, rewards={"m": MeanPixel()}, main="m", images_per_prompt=1, every=1, before=False, after=False,
    )  # fmt: skip
    for metric, callback in (
        ("eval/set", benchmark),
        ("eval/set/m/counting", benchmark),
        ("val/m", HeldOutEvaluation({"m": MeanPixel()}, "m", every=1)),
        ("held_out/m", HeldOutEvaluation({"m": MeanPixel()}, "m")),
        ("reward", RewardScoring({"other": MeanPixel()}, {"other": 1.0})),
    ):
        best = BestCheckpoint(metric)
        trainer = make_trainer(RewardScoring({"mean": MeanPixel()}), callback, best, enable_checkpointing=True)
        trainer.fit(make_module(), datamodule=make_data())
        assert best.value is not None, metric
        if best.path is not None:
            assert on_disk(tmp_path / "run")[1]["metric"] == metric


def test_a_metric_that_never_comes_is_told(make_trainer, make_data):
    with pytest.warns(UserWarning, match="by 'eval/y', which was never measured.*eval/x, .*reward"):
        run(make_trainer, make_data, {4: 1.0}, metric="eval/y")


def test_arguments_and_order_are_checked(make_trainer, make_data):
    with pytest.raises(ValueError, match="mode='best'"):
        BestCheckpoint(METRIC, "best")
    callbacks = Evaluates({}), IterationCheckpoint(), BestCheckpoint(METRIC)
    trainer = make_trainer(*callbacks, enable_checkpointing=True)
    with pytest.raises(ValueError, match="list BestCheckpoint before IterationCheckpoint"):
        trainer.fit(make_module(), datamodule=make_data())

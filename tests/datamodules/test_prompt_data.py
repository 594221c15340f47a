"""The datamodule under a real Trainer: order, workers, distributed settings, resume in the middle of the epoch."""

import json

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

from datamodules.prompt_data import PromptDataModule
from datamodules.sampler import PromptSampler
from lightning_modules.types import PromptBatch

POOL = [f"prompt {i}" for i in range(7)]


class Recorder(L.LightningModule):
    """Writes down what it is fed. Manual optimization with two optimizer steps an iteration, as Native may do."""

    def __init__(self, stop_at: int | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.iteration = 0
        self.stop_at = stop_at
        self.seen: list[PromptBatch] = []
        self.evaluated: list = []

    def training_step(self, batch, batch_idx):
        if batch.iteration == self.stop_at:
            raise KeyboardInterrupt
        assert batch.iteration == self.iteration == batch_idx
        self.seen.append(batch)
        for _ in range(2):
            self.optimizers().step()
        self.iteration += 1

    def validation_step(self, batch, batch_idx):
        self.evaluated.append(batch)

    test_step = predict_step = validation_step

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_save_checkpoint(self, checkpoint):
        checkpoint["iteration"] = self.iteration

    def on_load_checkpoint(self, checkpoint):
        self.iteration = checkpoint["iteration"]


class SaveOnException(Callback):
    def __init__(self, path) -> None:
        self.path = path

    def on_exception(self, trainer, pl_module, exception):
        trainer.save_checkpoint(self.path)


class Forgetful(Recorder):
    """Counts, but does not restore its counter."""

    def on_load_checkpoint(self, checkpoint):
        pass


@pytest.fixture
def files(tmp_path):
    """A training file of 7 prompts and an evaluation file of 3."""
    train, evaluation = tmp_path / "train.txt", tmp_path / "eval.jsonl"
    train.write_text("\n".join(POOL))
    evaluation.write_text("\n".join(json.dumps({"prompt": f"held-out {i}", "tag": str(i)}) for i in range(3)))
    return {"train": str(train), "evaluation": str(evaluation)}


@pytest.fixture
def trainer(tmp_path):
    def _trainer(**settings) -> L.Trainer:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "barebones": False}
        defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "enable_checkpointing": False}
        return L.Trainer(default_root_dir=tmp_path, **(quiet | defaults | settings))

    return _trainer


def data(files, iterations=5, **settings) -> PromptDataModule:
    return PromptDataModule(files["train"], prompts_per_step=3, iterations=iterations, **settings)


def expected(iterations: range, seed: int = 0) -> list[tuple[int, tuple[str, ...]]]:
    sampler = PromptSampler(len(POOL), 3, 100, seed)
    return [(k, tuple(POOL[i] for i in sampler.indices(k))) for k in iterations]


def seen(model: Recorder) -> list[tuple[int, tuple[str, ...]]]:
    return [(batch.iteration, batch.prompts) for batch in model.seen]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_trainer_sees_the_iterations_in_order(files, trainer, num_workers):
    model = Recorder()
    trainer(limit_train_batches=2).fit(model, datamodule=data(files, num_workers=num_workers, seed=4))
    assert seen(model) == expected(range(2), seed=4)
    assert model.seen[0].metadata[0] == {"prompt": model.seen[0].prompts[0]}


@pytest.mark.parametrize("use_distributed_sampler", [True, False])
def test_a_distributed_trainer_leaves_the_loaders_as_they_are(files, trainer, use_distributed_sampler):
    strategy = L.pytorch.strategies.DDPStrategy(process_group_backend="gloo")
    model = Recorder()
    fit = trainer(strategy=strategy, use_distributed_sampler=use_distributed_sampler)
    fit.fit(model, datamodule=data(files, val=files["evaluation"]))
    assert fit._accelerator_connector.is_distributed
    assert seen(model) == expected(range(5))
    assert type(fit.train_dataloader).__name__ == "ResumablePromptLoader"
    assert type(fit.val_dataloaders).__name__ == "EvalLoader"


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("limits", [{"max_epochs": 1}, {"max_epochs": -1, "max_steps": 10}])
def test_a_run_stopped_in_the_middle_goes_on_where_it_was(files, trainer, tmp_path, num_workers, limits):
    stopped, resumed = Recorder(stop_at=2), Recorder()
    checkpoint = tmp_path / "stopped.ckpt"
    with pytest.raises(SystemExit):  # Lightning's answer to Ctrl-C
        trainer(callbacks=[SaveOnException(checkpoint)], **limits).fit(
            stopped, datamodule=data(files, num_workers=num_workers)
        )
    second = trainer(**limits)
    second.fit(resumed, datamodule=data(files, num_workers=num_workers), ckpt_path=checkpoint)
    assert seen(stopped) == expected(range(2))
    assert seen(resumed) == expected(range(2, 5))
    assert second.global_step == 10


@pytest.mark.parametrize("done", [1, 2, 4])
def test_a_checkpoint_written_after_a_batch_resumes_with_the_next(files, trainer, tmp_path, recwarn, done):
    every = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=2, save_top_k=-1)
    whole, resumed = Recorder(), Recorder()
    trainer(enable_checkpointing=True, callbacks=[every]).fit(whole, datamodule=data(files))
    trainer().fit(resumed, datamodule=data(files), ckpt_path=tmp_path / f"step={2 * done}.ckpt")
    assert seen(whole) == expected(range(5))
    assert seen(resumed) == expected(range(done, 5))
    assert resumed.seen[0].prompts == whole.seen[done].prompts
    assert not [w for w in recwarn if "not resumable" in str(w.message)]


def test_a_finished_run_is_extended_by_more_iterations_and_one_epoch(files, trainer, tmp_path):
    first = trainer()
    first.fit(Recorder(), datamodule=data(files, iterations=3))
    first.save_checkpoint(tmp_path / "finished.ckpt")

    class Counting(Recorder):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch.iteration)  # the second epoch counts its batches anew

    model = Counting()
    trainer(max_epochs=2).fit(model, datamodule=data(files, iterations=5), ckpt_path=tmp_path / "finished.ckpt")
    assert seen(model) == expected(range(3, 5))


def test_a_module_that_does_not_restore_its_counter_is_refused(files, trainer, tmp_path):
    with pytest.raises(SystemExit):
        trainer(callbacks=[SaveOnException(tmp_path / "half.ckpt")]).fit(Forgetful(stop_at=2), datamodule=data(files))
    with pytest.raises(ValueError, match="written at iteration 2 but the model's counter says 0"):
        trainer().fit(Forgetful(), datamodule=data(files), ckpt_path=tmp_path / "half.ckpt")


def test_a_second_pass_over_the_run_is_refused(files, trainer):
    with pytest.raises(
        ValueError, match=r"trainer\.max_epochs=3: one epoch is the whole run; set trainer\.max_epochs to 1"
    ):
        trainer(max_epochs=3).fit(Recorder(), datamodule=data(files))
    with pytest.raises(ValueError, match="dealt before"):
        trainer(max_epochs=-1, max_steps=100).fit(Recorder(), datamodule=data(files, iterations=2))


def test_without_a_trainer_the_stream_starts_at_zero(files):
    assert [batch.iteration for batch in data(files, iterations=3).train_dataloader()] == [0, 1, 2]


def evaluated(model: Recorder) -> list[tuple[str, str, int, int]]:
    return [
        (text, row["tag"], int(prompt), int(image))
        for batch in model.evaluated
        for text, row, prompt, image in zip(
            batch.prompts, batch.metadata, batch.prompt_index, batch.image_index, strict=True
        )
    ]


@pytest.mark.parametrize(("split", "run"), [("val", "validate"), ("test", "test"), ("predict", "predict")])
def test_each_evaluation_sees_every_row_once(files, trainer, split, run):
    model = Recorder()
    module = data(files, images_per_prompt=2, eval_batch_size=4, **{split: files["evaluation"]})
    getattr(trainer(), run)(model, datamodule=module)
    assert [len(batch) for batch in model.evaluated] == [4, 2]
    assert evaluated(model) == [(f"held-out {i}", str(i), i, j) for i in range(3) for j in range(2)]


@pytest.mark.parametrize(("limit", "positions"), [(1, [0]), (2, [0, 1]), (3, [0, 1, 2]), (9, [0, 1, 2])])
def test_validation_may_use_fewer_prompts(files, limit, positions):
    loader = data(files, val=files["evaluation"], max_val_prompts=limit, images_per_prompt=1).val_dataloader()
    assert [int(i) for batch in loader for i in batch.prompt_index] == positions


def test_validation_during_fit_is_optional_but_a_missing_file_is_named(files, trainer):
    model = Recorder()
    trainer().fit(model, datamodule=data(files))
    assert len(model.seen) == 5 and not model.evaluated
    for run, split in (("validate", "val"), ("test", "test"), ("predict", "predict")):
        with pytest.raises(ValueError, match=rf"set data\.init_args\.{split} to"):
            getattr(trainer(), run)(Recorder(), datamodule=data(files))


def test_a_bad_file_stops_the_run_before_the_first_batch(files, trainer, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"txt": "b"}\n')
    model = Recorder()
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2: no field 'prompt'"):
        trainer().fit(model, datamodule=data(files, val=str(tmp_path / "bad.jsonl")))
    assert not model.seen


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("iterations", 0),
        ("prompts_per_step", 0),
        ("num_workers", -1),
        ("images_per_prompt", 0),
        ("eval_batch_size", 0),
        ("max_val_prompts", 0),
    ],
)
def test_settings_are_checked(files, name, value):
    with pytest.raises(ValueError, match=f"{name}={value}: give an integer"):
        PromptDataModule(**({"train": files["train"], "prompts_per_step": 2, "iterations": 3} | {name: value}))

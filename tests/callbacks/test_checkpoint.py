"""Which checkpoints exist when, also after a run that was broken off."""

import os
import signal

import pytest
import torch
from lightning.pytorch import Callback, LightningModule

from callbacks.checkpoint import IterationCheckpoint
from lightning_modules.schedules.native import Native
from tests.loop import Scorer, fit, module


def run(root, iterations, *, checkpoint=None, model=None, **options):
    checkpoint = checkpoint or IterationCheckpoint(every=2, keep=2)
    fit(model or module(), iterations, root=root, callbacks=[checkpoint], enable_checkpointing=True, **options)


def names(root):
    return sorted(file.name for file in (root / "checkpoints").iterdir())


def iteration_of(path):
    return torch.load(path, weights_only=True)["lean_grpo"]["iteration"]


class Failing(Scorer):
    """Raises on the second chunk of groups of iteration ``at`` (0-based), when the first is scored already."""

    def __init__(self, at, error=None):
        super().__init__()
        self.at, self.error = at, error or RuntimeError("the reward failed")

    def on_rollout_end(self, trainer, pl_module, samples, scores):
        if pl_module.iteration == self.at and samples.rows.prompt.min() > 0:
            raise self.error
        super().on_rollout_end(trainer, pl_module, samples, scores)


class FailingStep(torch.optim.SGD):
    """Moves the parameters and raises on one call of ``step``, as an interrupt between two of its tensors would."""

    def __init__(self, parameters, lr, fail_on):
        super().__init__(parameters, lr=lr)
        self.calls, self.fail_on = 0, fail_on

    def step(self, closure=None):
        loss = super().step(closure)
        self.calls += 1
        if self.calls == self.fail_on:
            raise RuntimeError("interrupted inside the optimizer")
        return loss


def test_periodic_and_final_checkpoints_of_which_the_newest_are_kept(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "iteration_000001.ckpt").write_bytes(b"somebody else's")
    run(tmp_path, 7)
    assert names(tmp_path) == ["iteration_000001.ckpt", "iteration_000006.ckpt", "iteration_000007.ckpt", "last.ckpt"]
    assert iteration_of(tmp_path / "checkpoints" / "iteration_000006.ckpt") == 6
    assert iteration_of(tmp_path / "checkpoints" / "last.ckpt") == 7
    assert os.path.samefile(tmp_path / "checkpoints" / "last.ckpt", tmp_path / "checkpoints" / "iteration_000007.ckpt")


def test_last_is_a_copy_where_there_are_no_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("no links here")))
    run(tmp_path, 2)
    last, newest = tmp_path / "checkpoints" / "last.ckpt", tmp_path / "checkpoints" / "iteration_000002.ckpt"
    assert last.read_bytes() == newest.read_bytes()
    assert not os.path.samefile(last, newest)


def test_it_counts_rollouts_not_optimizer_steps(tmp_path):
    model = module(Native(updates_per_rollout=2), micro_batch=2)
    run(tmp_path, 3, model=model, checkpoint=IterationCheckpoint(every=3))
    assert model.trainer.global_step == 6
    assert names(tmp_path) == ["iteration_000003.ckpt", "last.ckpt"]


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_exception_saves_the_last_completed_iteration(at, tmp_path, capsys):
    model = module()
    with pytest.raises(RuntimeError, match="the reward failed"):
        run(tmp_path, 5, model=model, scorer=Failing(at))
    last = tmp_path / "checkpoints" / "last.ckpt"
    assert iteration_of(last) == at
    saved = torch.load(last, weights_only=True)["state_dict"]
    assert all(torch.equal(saved[k], v) for k, v in model.state_dict().items())
    assert f"ckpt_path={str(last)!r}" in capsys.readouterr().out  # no config.yaml here, so how to go on in Python


def test_the_command_to_resume_uses_the_saved_config(tmp_path, capsys):
    (tmp_path / "config.yaml").touch()
    with pytest.raises(RuntimeError):
        run(tmp_path, 5, scorer=Failing(3))
    command = f"python train.py fit --config {tmp_path}/config.yaml --ckpt_path {tmp_path}/checkpoints/last.ckpt"
    assert command in capsys.readouterr().out


def test_control_c_saves_and_exits_with_an_error(tmp_path):
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as exit:
            run(tmp_path, 5, scorer=Failing(3, KeyboardInterrupt()))
    finally:
        signal.signal(signal.SIGINT, handler)  # Lightning ignores further interrupts from then on
    assert exit.value.code == 1
    assert iteration_of(tmp_path / "checkpoints" / "last.ckpt") == 3


def test_before_the_first_iteration_is_complete_there_is_nothing_to_save(tmp_path, capsys):
    with pytest.raises(RuntimeError):
        run(tmp_path, 5, scorer=Failing(0))
    assert not (tmp_path / "checkpoints").exists()
    assert "nothing to resume" in capsys.readouterr().out


def test_a_resumed_run_that_completes_nothing_points_to_where_it_came_from(tmp_path, capsys):
    run(tmp_path / "first", 2)
    origin = tmp_path / "first" / "checkpoints" / "last.ckpt"
    with pytest.raises(RuntimeError):
        run(tmp_path / "second", 5, scorer=Failing(2), ckpt_path=origin)
    assert not (tmp_path / "second" / "checkpoints").exists()
    assert str(origin) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("updates", "fail_on", "complete"),
    [(1, 4, 2), (2, 7, 2), (2, 8, 2)],  # 4th iteration; first and second update of the 4th
)
def test_a_moved_policy_of_an_incomplete_iteration_is_never_saved(updates, fail_on, complete, tmp_path, capsys):
    model = module(
        Native(updates_per_rollout=updates), micro_batch=2, optimizer=lambda p, lr: FailingStep(p, lr, fail_on=fail_on)
    )
    with pytest.raises(RuntimeError, match="interrupted inside the optimizer"):
        run(tmp_path, 5, model=model)
    assert model.iteration == 3
    assert names(tmp_path) == ["iteration_000002.ckpt", "last.ckpt"]
    assert iteration_of(tmp_path / "checkpoints" / "last.ckpt") == complete
    assert "no checkpoint of iteration 3: the policy has moved" in capsys.readouterr().out


def test_of_several_updates_a_rollout_the_first_comes_after_the_last_reward(tmp_path):
    """So whatever a reward raises, the state of the last completed iteration is still whole."""
    with pytest.raises(RuntimeError):
        run(tmp_path, 5, model=module(Native(updates_per_rollout=2), micro_batch=2), scorer=Failing(3))
    assert iteration_of(tmp_path / "checkpoints" / "last.ckpt") == 3


def test_a_failing_save_does_not_hide_why_the_run_ended(tmp_path, capsys, monkeypatch):
    class BreakSaving(Callback):
        def on_train_batch_end(self, trainer, *_):
            if trainer.lightning_module.iteration == 3:
                monkeypatch.setattr(
                    trainer.strategy, "save_checkpoint", lambda *_, **__: (_ for _ in ()).throw(OSError("disk full"))
                )

    with pytest.raises(RuntimeError, match="the reward failed"):
        fit(module(), 5, root=tmp_path, scorer=Failing(3), enable_checkpointing=True,
            callbacks=[IterationCheckpoint(every=2), BreakSaving()])  # fmt: skip
    out = capsys.readouterr().out
    assert "no checkpoint of iteration 3: disk full" in out
    assert "after iteration 2" in out
    assert str(tmp_path / "checkpoints" / "last.ckpt") in out


def test_an_exception_after_training_saves_nothing_again(tmp_path):
    class Late(Callback):
        def on_fit_end(self, trainer, pl_module):
            raise RuntimeError("late")

    with pytest.raises(RuntimeError, match="late"):
        fit(module(), 2, root=tmp_path, enable_checkpointing=True, callbacks=[Late(), IterationCheckpoint(every=5)])
    assert names(tmp_path) == ["iteration_000002.ckpt", "last.ckpt"]


@pytest.mark.parametrize("arguments", [{"every": 0}, {"keep": 0}])
def test_refusals(arguments):
    with pytest.raises(ValueError, match="give an integer of at least 1"):
        IterationCheckpoint(**arguments)


def test_a_module_without_iterations_is_refused():
    with pytest.raises(ValueError, match="counts no iterations: use .*ModelCheckpoint"):
        IterationCheckpoint().setup(None, LightningModule(), "fit")
    IterationCheckpoint().setup(None, LightningModule(), "test")

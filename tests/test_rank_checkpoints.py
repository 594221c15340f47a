"""One checkpoint format whatever the strategy and the number of processes: what any of them saves, any other continues."""

import contextlib
import io as io_module
import time
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from safetensors.torch import load_file

from callbacks.checkpoint import IterationCheckpoint
from callbacks.checkpoint_io import AtomicCheckpointIO
from callbacks.ema import EMA
from callbacks.export import Export
from datamodules.prompt_data import PromptDataModule
from lightning_modules.export.__main__ import load_weights
from lightning_modules.parallel.tensors import whole
from lightning_modules.strategies import FSDP2Strategy
from tests.command_line import load
from tests.loop import Recorder
from tests.rank_runs import STRATEGIES, TEXTS, Capture, Case, GivenRewards, make_module
from tests.ranks import pool

SAVED, WHOLE = 2, 4
"""Iterations before the checkpoint, and of the whole run."""
BOUND = 5e-6
"""Relative L2 of weights and averages, fp32."""
KINDS = STRATEGIES | {"sharded": lambda: FSDP2Strategy(sharded_checkpoints=True)}
LORA = Case(schedule="retain", policy="lora", prompts=2, generations=3)
FULL = replace(LORA, policy="full", prompts=1)
PLACES = [
    ("single", 1),
    ("ddp", 2),
    ("fsdp2", 1),
    ("fsdp2", 2),
    ("fsdp2", 4),
    ("hybrid", 4),
    ("sharded", 2),
    ("sharded", 4),
]


def train(case, root, iterations, ckpt_path=None, callbacks=(), io=None):
    """Train up to ``iterations`` -> what this rank has at the end, whole."""
    model, capture, recorder, ema = make_module(case), Capture(), Recorder(), EMA(decay=0.9)
    (Path(root) / "prompts.txt").write_text("\n".join(TEXTS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = Trainer(
            accelerator="cpu", devices=case.ranks, strategy=KINDS[case.strategy](), max_epochs=1, logger=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=root, use_distributed_sampler=False,
            plugins=[io or AtomicCheckpointIO()],
            callbacks=[
                GivenRewards(case.table), capture, recorder, ema, *callbacks, IterationCheckpoint(every=SAVED, keep=9),
            ],
        )  # fmt: skip
        data = PromptDataModule(str(Path(root) / "prompts.txt"), prompts_per_step=case.prompts, iterations=iterations)
        trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return {
        "weights": {name: whole(p.detach()).clone() for name, p in trained.items()},
        "average": {name: whole(value).clone() for name, value in ema.weights.items()},
        "gradients": capture.gradients,
        "metrics": recorder.metrics,
    }


def on(case, place):
    return replace(case, strategy=place[0], ranks=place[1])


def run(case, root, iterations, ckpt_path=None):
    """The first rank's results; the others have the same."""
    root.mkdir(parents=True, exist_ok=True)
    if case.ranks == 1 and case.strategy == "single":
        return train(case, root, iterations, ckpt_path)
    results = pool(case.ranks).run(train, case, root, iterations, ckpt_path, timeout=110)
    for other in results[1:]:
        assert all(torch.equal(v, results[0]["weights"][n]) for n, v in other["weights"].items())
    return results[0]


def checkpoint(root, iteration=SAVED):
    return root / "checkpoints" / f"iteration_{iteration:06d}.ckpt"


def distance(ours, theirs):
    assert ours.keys() == theirs.keys()
    ours, theirs = (torch.cat([v.double().flatten() for v in side.values()]) for side in (ours, theirs))
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(policy, place) -> folder of a run of ``SAVED`` iterations there, made once."""
    made = {}

    def at(case, place):
        if (case.policy, place) not in made:
            root = tmp_path_factory.mktemp(f"{case.policy}_{place[0]}_{place[1]}")
            run(on(case, place), root, SAVED)
            made[case.policy, place] = root
        return made[case.policy, place]

    return at


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """policy -> the run of ``WHOLE`` iterations in one process."""
    return {case.policy: run(case, tmp_path_factory.mktemp("whole"), WHOLE) for case in (LORA, FULL)}


def same_shape(ours, theirs, path="checkpoint"):
    """Two checkpoints have the same keys, types, dtypes and shapes; numbers agree up to fp32 rounding."""
    assert type(ours) is type(theirs), path
    if isinstance(ours, dict):
        assert list(ours) == list(theirs), path
        for key in ours:
            if key != "rng":  # of the first process, which made other samples
                same_shape(ours[key], theirs[key], f"{path}[{key!r}]")
    elif isinstance(ours, (list, tuple)):
        assert len(ours) == len(theirs), path
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            same_shape(*pair, f"{path}[{index}]")
    elif isinstance(ours, torch.Tensor):
        assert (ours.dtype, ours.shape, ours.device) == (theirs.dtype, theirs.shape, theirs.device), path
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    elif isinstance(ours, float):
        assert ours == pytest.approx(theirs, rel=1e-6), path
    else:
        assert ours == theirs, path


@pytest.mark.parametrize("place", [("fsdp2", 2), ("hybrid", 4)], ids=str)
def test_the_file_is_the_same_whatever_saved_it(place, files):
    ours, theirs = (load(checkpoint(files(LORA, where))) for where in (place, PLACES[0]))
    same_shape(ours, theirs)
    assert all(name.startswith("policy.") and "lora_" in name for name in ours["state_dict"])
    assert ours["optimizer_states"][0]["state"] and ours["callbacks"]["EMA"]["weights"]


def test_a_folder_of_shards_holds_what_the_file_holds(files):
    root = files(LORA, ("sharded", 2))
    assert checkpoint(root).is_dir() and (root / "checkpoints" / "last.ckpt").is_symlink()
    assert sorted(path.name for path in (root / "checkpoints").iterdir()) == ["iteration_000002.ckpt", "last.ckpt"]
    ours = AtomicCheckpointIO().load_checkpoint(root / "checkpoints" / "last.ckpt")
    same_shape(ours, load(checkpoint(files(LORA, PLACES[0]))))


ROUTES = [
    (("single", 1), ("ddp", 2)),
    (("single", 1), ("fsdp2", 4)),
    (("fsdp2", 2), ("single", 1)),
    (("hybrid", 4), ("fsdp2", 2)),
    (("hybrid", 4), ("single", 1)),
    (("sharded", 2), ("hybrid", 4)),
]


def check(case, source, target, files, uninterrupted, root):
    theirs = uninterrupted[case.policy]
    ours = run(on(case, target), root, WHOLE, checkpoint(files(case, source)))
    assert distance(ours["weights"], theirs["weights"]) < BOUND
    assert distance(ours["average"], theirs["average"]) < BOUND
    for mine, other in zip(ours["gradients"], theirs["gradients"][SAVED:], strict=True):
        assert distance({"": mine}, {"": other}) < 1e-4
    for name in ("iteration", "reward", "grad_norm"):
        resumed, whole_run = ([m[name] for m in side["metrics"]] for side in (ours, theirs))
        assert resumed == pytest.approx(whole_run[SAVED:], rel=1e-4), name


@pytest.mark.parametrize(("source", "target"), ROUTES, ids=str)
def test_a_resume_on_another_number_of_processes_continues_the_trajectory(
    source, target, files, uninterrupted, tmp_path
):
    check(LORA, source, target, files, uninterrupted, tmp_path)


@pytest.mark.parametrize(("source", "target"), [(("fsdp2", 2), ("single", 1))], ids=str)
def test_of_full_fine_tuning_too(source, target, files, uninterrupted, tmp_path):
    check(FULL, source, target, files, uninterrupted, tmp_path)


@pytest.mark.slow  # pytest -m slow tests/test_rank_checkpoints.py
@pytest.mark.parametrize("case", [LORA, FULL], ids=["lora", "full"])
@pytest.mark.parametrize("source", PLACES, ids=str)
def test_every_route(case, source, files, uninterrupted, tmp_path):
    for k, target in enumerate([*PLACES, ("ddp", 4)]):
        check(case, source, target, files, uninterrupted, tmp_path / str(k))


# exports


@pytest.mark.parametrize(
    ("case", "place"),
    [
        (LORA, ("ddp", 2)),
        (FULL, ("fsdp2", 2)),
        pytest.param(LORA, ("fsdp2", 2), marks=pytest.mark.slow),
        pytest.param(LORA, ("hybrid", 4), marks=pytest.mark.slow),
    ],
    ids=lambda value: value.policy if isinstance(value, Case) else str(value),
)
def test_an_export_in_the_run_is_that_of_one_process(case, place, tmp_path):
    """The averages, gathered; diffusers' own loader has read them back before the folder gets its name."""
    for root, where in ((tmp_path / "single", PLACES[0]), (tmp_path / "many", place)):
        export(on(case, where), root)
    ours, theirs = (exported(tmp_path / name) for name in ("many", "single"))
    assert distance(ours["tensors"], theirs["tensors"]) < BOUND
    assert ours["config"] == theirs["config"]


def export(case, root):
    root.mkdir()
    if case.ranks == 1:
        train(case, root, 1, None, [Export()])
    else:
        pool(case.ranks).run(train, case, root, 1, None, [Export()], timeout=110)


def exported(root):
    (folder,) = (root / "export").iterdir()
    (weights,) = folder.glob("*.safetensors")
    config = folder / "config.json"
    return {"tensors": load_file(weights), "config": config.read_text() if config.exists() else None}


@pytest.mark.parametrize("place", [("fsdp2", 2), ("sharded", 2)], ids=str)
def test_a_checkpoint_of_many_processes_is_exported_afterwards(place, files, tmp_path):
    root = files(LORA, place)
    policy = make_module(LORA).policy
    said = load_weights(policy, checkpoint(root))
    assert said == "averaged weights after iteration 2"
    average = AtomicCheckpointIO().load_checkpoint(checkpoint(root))["callbacks"]["EMA"]["weights"]
    mine = {f"policy.{name}": p for name, p in policy.named_parameters() if p.requires_grad}
    assert all(torch.equal(mine[name], value) for name, value in average.items()) and mine.keys() == average.keys()


# a process that fails


class FailsOn(Callback):
    """Raises on one rank in iteration 3: ``where`` the others learn of it (scoring), or not (before the rollout)."""

    def __init__(self, rank, where):
        self.rank, self.where = rank, where

    def _fail(self, trainer, pl_module, where):
        if pl_module.iteration == 3 and trainer.global_rank == self.rank and where == self.where:
            raise ValueError("this rank fails")

    def on_rollout_end(self, trainer, pl_module, samples, scores):
        self._fail(trainer, pl_module, "scoring")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self._fail(trainer, pl_module, "alone")


def broken_off(case, root, callbacks, io=None):
    """Train until something raises -> (the exception as text, seconds, what was printed)."""
    IterationCheckpoint.grace = 1.5
    said, start = io_module.StringIO(), time.monotonic()
    try:
        with contextlib.redirect_stdout(said):
            train(case, root, WHOLE + 2, None, callbacks, io)
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start, said.getvalue()
    finally:
        IterationCheckpoint.grace = 60.0
    raise AssertionError("nothing was raised")


@pytest.mark.parametrize(("strategy", "rank"), [("ddp", 1), ("sharded", 0)])
def test_where_one_rank_fails_all_stop_and_save(strategy, rank, tmp_path):
    results = pool(2).run(broken_off, on(LORA, (strategy, 2)), tmp_path, [FailsOn(rank, "scoring")])
    assert results[rank][0] == "ValueError: this rank fails"
    assert results[1 - rank][0] == f"RuntimeError: rank {rank} failed in iteration 3: ValueError: this rank fails"
    assert max(seconds for _, seconds, _ in results) < 20
    last = AtomicCheckpointIO().load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert last["lean_grpo"]["iteration"] == 3
    assert "broken off after iteration 3. Resume with" in results[0][2]
    assert "Resume" not in results[1][2] and "rank 1 stops: " in results[1][2]


@pytest.mark.parametrize(("strategy", "saved", "rank"), [("ddp", 3, 1), ("fsdp2", 2, 0)])
def test_a_rank_that_leaves_the_others_alone_does_not_hang_them(strategy, saved, rank, tmp_path):
    """A replicated policy is saved by the first rank; of a sharded one the last checkpoint stays."""
    case = replace(on(LORA, (strategy, 2)), options={"rank_timeout": 3.0})
    results = pool(2).run(broken_off, case, tmp_path, [FailsOn(rank, "alone")])
    pool(2).close()  # the ranks are no longer in step
    assert results[rank][0] == "ValueError: this rank fails"
    assert "not every rank arrived at" in results[1 - rank][0]
    assert load(tmp_path / "checkpoints" / "last.ckpt")["lean_grpo"]["iteration"] == saved
    assert f"broken off after iteration {saved}" in results[0][2]
    assert ("no checkpoint of iteration 3" in results[0][2]) == (strategy == "fsdp2")


class FullDisk(AtomicCheckpointIO):
    def save_checkpoint(self, checkpoint, path, storage_options=None):
        if checkpoint["lean_grpo"]["iteration"] > SAVED:
            raise OSError("disk full")
        super().save_checkpoint(checkpoint, path, storage_options)


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp2"])
def test_a_checkpoint_that_cannot_be_written_stops_every_rank(strategy, tmp_path):
    results = pool(2).run(broken_off, on(LORA, (strategy, 2)), tmp_path, [], FullDisk())
    assert results[0][0] == "OSError: disk full"
    assert results[1][0] == "RuntimeError: rank 0 failed in the checkpoint of iteration 4: OSError: disk full"
    assert max(seconds for _, seconds, _ in results) < 20
    assert load(tmp_path / "checkpoints" / "last.ckpt")["lean_grpo"]["iteration"] == SAVED

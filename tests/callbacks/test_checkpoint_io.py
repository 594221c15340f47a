"""A checkpoint is whole or absent, and what is not one is told so in one sentence."""

import os
import resource

import pytest
import torch
from lightning.pytorch import Trainer

from callbacks.checkpoint_io import AtomicCheckpointIO
from tests.loop import fit, module

OLD = {"state_dict": {"w": torch.zeros(3)}, "loops": {}}
NEW = {"state_dict": {"w": torch.ones(100_000)}, "loops": {}}


@pytest.fixture
def io():
    return AtomicCheckpointIO()


@pytest.fixture
def old(io, tmp_path):
    path = tmp_path / "last.ckpt"
    io.save_checkpoint(OLD, path)
    return path


def assert_old_alone(io, path):
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    assert torch.equal(io.load_checkpoint(path)["state_dict"]["w"], OLD["state_dict"]["w"])


def test_what_is_saved_is_loaded(io, tmp_path):
    path = tmp_path / "new" / "folder" / "x.ckpt"
    io.save_checkpoint(NEW, path)
    assert torch.equal(io.load_checkpoint(path)["state_dict"]["w"], NEW["state_dict"]["w"])
    assert [file.name for file in path.parent.iterdir()] == ["x.ckpt"]


def test_a_full_disk_leaves_the_previous_checkpoint(io, old):
    """The kernel refuses bytes beyond 100 kB, as it does when no space is left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises((OSError, RuntimeError)) as caught:
            io.save_checkpoint(NEW, old)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert str(old) in caught.value.__notes__[0]
    assert_old_alone(io, old)


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_a_break_in_the_middle_leaves_the_previous_checkpoint(error, io, old, monkeypatch):
    def write_half(checkpoint, file):
        file.write(b"half")
        raise error

    monkeypatch.setattr(torch, "save", write_half)
    with pytest.raises(error):
        io.save_checkpoint(NEW, old)
    assert_old_alone(io, old)


def test_the_name_is_given_only_after_the_content_is_on_the_disk(io, old, monkeypatch):
    order = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (order.append("fsync"), fsync(descriptor)))
    monkeypatch.setattr(os, "replace", lambda source, target: (order.append("replace"), replace(source, target)))
    io.save_checkpoint(NEW, old)
    assert order == ["fsync", "replace", "fsync"]  # content, name, folder


def test_what_a_killed_process_left_is_removed_and_nothing_else(io, old):
    (old.parent / ".iteration_000004.4242.ckpt").write_bytes(b"half")
    (old.parent / ".mine.ckpt").write_bytes(b"a user's")
    io.save_checkpoint(NEW, old)
    assert sorted(file.name for file in old.parent.iterdir()) == [".mine.ckpt", "last.ckpt"]


@pytest.mark.parametrize("size", [0, 1, 100, 200_000, -1])
def test_a_truncated_file(size, io, tmp_path):
    path = tmp_path / "cut.ckpt"
    io.save_checkpoint(NEW, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"cut\.ckpt is no readable checkpoint: it is truncated") as caught:
        io.load_checkpoint(path)
    assert caught.value.__suppress_context__  # no traceback of pickle's
    assert "\n" not in str(caught.value)


class Code:
    """Something that a file could run."""


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_text("seed_everything: 0\n"),
        lambda path: torch.save({"state_dict": {}, "loops": Code()}, path),
        lambda path: torch.save({"w": torch.ones(2)}, path),
        lambda path: torch.save([1, 2], path),
    ],
)
def test_a_foreign_file(write, io, tmp_path):
    path = tmp_path / "foreign.ckpt"
    write(path)
    with pytest.raises(ValueError, match=r"foreign\.ckpt (is no readable checkpoint|holds no training state)"):
        io.load_checkpoint(path)


def test_a_missing_file_names_its_neighbours(io, old):
    with pytest.raises(ValueError, match=r"there is no checkpoint .*first\.ckpt; beside it: .*last\.ckpt"):
        io.load_checkpoint(old.with_name("first.ckpt"))
    with pytest.raises(ValueError, match=r"nowhere/first\.ckpt; check the path"):
        io.load_checkpoint(old.parent / "nowhere" / "first.ckpt")


def test_storage_options_are_refused(io, tmp_path):
    with pytest.raises(ValueError, match="storage_options"):
        io.save_checkpoint(NEW, tmp_path / "x.ckpt", storage_options={})


def test_the_trainer_uses_it(tmp_path):
    model = module()
    fit(model, 1, root=tmp_path)
    trainer = model.trainer
    trainer.strategy.checkpoint_io = AtomicCheckpointIO()
    trainer.save_checkpoint(tmp_path / "x.ckpt")
    (tmp_path / "cut.ckpt").write_bytes((tmp_path / "x.ckpt").read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"cut\.ckpt is no readable checkpoint"):
        fit(module(), 2, root=tmp_path, ckpt_path=tmp_path / "cut.ckpt", plugins=[AtomicCheckpointIO()])
    assert isinstance(Trainer(plugins=[AtomicCheckpointIO()], logger=False).strategy.checkpoint_io, AtomicCheckpointIO)

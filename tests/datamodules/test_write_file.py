import os

import pytest

from datamodules.write_file import write_file


def test_it_writes_replaces_and_leaves_nothing_else(tmp_path):
    file = tmp_path / "deep" / "a.txt"
    write_file(file, b"one")
    write_file(file, b"two")
    assert file.read_bytes() == b"two"
    assert os.listdir(file.parent) == ["a.txt"]
    assert file.stat().st_mode & 0o777 == 0o644


def test_a_failure_keeps_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a.txt"
    write_file(file, b"one")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ValueError, match=r"cannot write .*a\.txt: No space left on device"):
        write_file(file, b"two")
    assert file.read_bytes() == b"one"
    assert os.listdir(tmp_path) == ["a.txt"]


def test_a_place_that_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="choose another place"):
        write_file(tmp_path / "file" / "a.txt", b"")

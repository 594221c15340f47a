import functools
import hashlib
import os

import huggingface_hub
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from rewards.files import checksum, fill, find_file, find_folder, read_weights


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A hub cache with one repository, ``someone/model``, that holds ``weights.pt`` and ``config.json``."""
    repository = tmp_path / "models--someone--model"
    (repository / "snapshots" / "abc").mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("abc")
    for name in ("weights.pt", "config.json"):
        (repository / "snapshots" / "abc" / name).write_text(name)
    for name in ("hf_hub_download", "snapshot_download"):
        monkeypatch.setattr(
            huggingface_hub, name, functools.partial(getattr(huggingface_hub, name), cache_dir=tmp_path)
        )
    return repository / "snapshots" / "abc"


def test_a_file_is_found_by_its_path_by_its_folder_and_in_the_cache(tmp_path, cache, monkeypatch):
    file = tmp_path / "mine.pt"
    file.write_text("")
    assert find_file(str(file), "weights.pt", what="test") == file
    assert find_file(str(cache), "weights.pt", what="test") == cache / "weights.pt"
    assert find_file("someone/model", "weights.pt", what="test").read_text() == "weights.pt"
    monkeypatch.chdir(tmp_path)
    assert find_file("mine.pt", "weights.pt", what="test").samefile(file)


def test_a_folder_is_found_by_its_path_and_in_the_cache(cache):
    assert find_folder(str(cache), ["*.json"], what="test") == cache
    assert find_folder("someone/model", ["*.json"], what="test") == cache


@pytest.mark.parametrize("source", ["/nowhere/HPS.pt", "weights/HPS.pt", "~/HPS.pt", "HPS", "../a/b"])
def test_a_missing_path_is_named_with_the_command(source):
    with pytest.raises(ValueError, match=r"the score: no .*To get it: hf download someone/model HPS.pt") as error:
        find_file(source, "HPS.pt", what="the score", get="hf download someone/model HPS.pt")
    assert os.path.expanduser(source) in str(error.value)


def test_a_folder_without_the_file(tmp_path):
    with pytest.raises(ValueError, match=f"no {tmp_path}/HPS.pt"):
        find_file(str(tmp_path), "HPS.pt", what="the score")
    with pytest.raises(ValueError, match="no folder /nowhere/at/all"):
        find_folder("/nowhere/at/all", ["config.json"], what="the score")


def test_what_the_hub_cannot_give_is_one_message_with_the_command(cache):
    with pytest.raises(ValueError, match="the score: no HPS.pt of someone/other.*`hf download someone/other HPS.pt`"):
        find_file("someone/other", "HPS.pt", what="the score")
    with pytest.raises(ValueError, match=r"`hf download someone/other --include 'a.json' --include '\*.txt'`"):
        find_folder("someone/other", ["a.json", "*.txt"], what="the score")


@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_weights_are_read_and_truncated_files_are_not(tmp_path, name):
    file = tmp_path / name
    (save_file if name.endswith("safetensors") else torch.save)({"a": torch.arange(1000.0)}, file)
    assert torch.equal(read_weights(file)["a"], torch.arange(1000.0))
    file.write_bytes(file.read_bytes()[:-500])
    with pytest.raises(ValueError, match=f"{name}.*get it again") as error:
        read_weights(file)
    assert "\n" not in str(error.value)


def test_a_pickle_that_runs_code_is_refused(tmp_path):
    class Trap:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "trapped"),)

    torch.save({"state_dict": Trap()}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match="no file of tensors") as error:
        read_weights(tmp_path / "w.pt")
    assert not (tmp_path / "trapped").exists()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("weights", [{}, {"weight": torch.zeros(3, 2)}, {"weight": torch.zeros(1, 2), "extra": 1}])
def test_weights_must_fit_in_every_name_and_shape(tmp_path, weights):
    network = nn.Linear(2, 1, bias=False)
    fill(network, {"weight": torch.tensor([[3.0, 4.0]])}, file=tmp_path, what="the head")
    assert network.weight.tolist() == [[3.0, 4.0]]
    with pytest.raises(ValueError, match=f"the head: the weights in {tmp_path} are of another network"):
        fill(network, weights, file=tmp_path, what="the head")


def test_the_checksum_follows_the_file(tmp_path):
    file = tmp_path / "w.pt"
    file.write_bytes(b"one")
    assert checksum(file) == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"three")
    assert checksum(file) == hashlib.sha256(b"three").hexdigest()

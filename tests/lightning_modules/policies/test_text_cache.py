"""The cache gives back what was encoded, for exactly that prompt and model, whatever happens to its files."""

import os
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file

from lightning_modules.policies.text_cache import EmbeddingCache


class Encoder:
    """Counts what it is asked; a prompt's rows depend on the prompt alone."""

    def __init__(self, offset=0.0):
        self.asked, self.offset = [], offset

    def __call__(self, prompts):
        self.asked.append(list(prompts))
        values = torch.tensor([float(sum(map(ord, p))) + self.offset for p in prompts])
        return {"text": (values[:, None, None] * torch.ones(2, 3)).bfloat16(), "pooled": values[:, None].double()}


def test_a_prompt_is_encoded_once_and_comes_back_bit_for_bit(tmp_path):
    encoder, prompts = Encoder(), ["a cat", "ein Bär 🐻", "a cat", ""]
    first = EmbeddingCache(tmp_path, "m")(prompts, encoder)
    assert encoder.asked == [["a cat", "ein Bär 🐻", ""]]
    again = EmbeddingCache(tmp_path, "m")(prompts, encoder)  # another run
    assert len(encoder.asked) == 1
    direct = encoder(prompts)
    for name in ("text", "pooled"):
        assert first[name].dtype == direct[name].dtype
        assert torch.equal(first[name], direct[name]) and torch.equal(again[name], direct[name])


def test_only_what_is_missing_is_encoded(tmp_path):
    encoder, cache = Encoder(), EmbeddingCache(tmp_path / "new" / "folder", "m")
    cache(["a", "b"], encoder)
    mixed = cache(["c", "a"], encoder)
    assert encoder.asked == [["a", "b"], ["c"]]
    assert torch.equal(mixed["pooled"], encoder(["c", "a"])["pooled"])


def test_another_model_has_its_own_entries(tmp_path):
    EmbeddingCache(tmp_path, "model one")(["a"], Encoder())
    other = Encoder(offset=5.0)
    rows = EmbeddingCache(tmp_path, "model two")(["a"], other)
    assert other.asked == [["a"]]
    assert rows["pooled"].item() == ord("a") + 5.0


GARBAGE = {
    "text": b"garbage" * 100,
    "zeros": bytes(4096),
    "a header of no length": (0).to_bytes(8, "little"),
    "a header that is no json": (4).to_bytes(8, "little") + b"\xff{]x",
    "a header larger than the file": (2**40).to_bytes(8, "little") + b"{}",
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_garbage_is_made_again(tmp_path, content):
    cache, encoder = EmbeddingCache(tmp_path, "m"), Encoder()
    right = cache(["a"], encoder)
    cache.path("a").write_bytes(content)
    with pytest.warns(UserWarning, match="cannot be used .*made again"):
        assert torch.equal(cache(["a"], encoder)["text"], right["text"])
    assert torch.equal(cache(["a"], encoder)["text"], right["text"]) and len(encoder.asked) == 2


def test_tensors_without_our_header_are_made_again(tmp_path):
    cache, encoder = EmbeddingCache(tmp_path, "m"), Encoder()
    cache(["a"], encoder)
    save_file(load_file(cache.path("a")), cache.path("a"))
    with pytest.warns(UserWarning, match="belongs to another prompt or model"):
        cache(["a"], encoder)
    assert len(encoder.asked) == 2


def test_a_folder_that_cannot_be_written_is_still_read(tmp_path, monkeypatch):
    """Another user's folder, or a full disk: training goes on."""
    encoder, cache = Encoder(), EmbeddingCache(tmp_path, "m")
    cache(["a"], encoder)

    def refuse(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("lightning_modules.policies.text_cache.os.replace", refuse)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache(["a"], encoder)
    for _ in range(2):
        with pytest.warns(UserWarning, match=r"cannot be kept in .* \(Permission denied\)"):
            rows = cache(["a", "b"], encoder)
        assert rows["pooled"].flatten().tolist() == [ord("a"), ord("b")]
    assert encoder.asked == [["a"], ["b"], ["b"]]
    assert list(tmp_path.iterdir()) == [cache.path("a")]


def test_a_folder_in_a_files_place_is_survived(tmp_path):
    cache = EmbeddingCache(tmp_path, "m")
    cache.path("a").mkdir()
    with pytest.warns(UserWarning) as said:
        assert cache(["a"], Encoder())["pooled"].item() == ord("a")
    assert [word in str(w.message) for w, word in zip(said, ("cannot be used", "cannot be kept"), strict=True)] == [
        True
    ] * 2


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_files_of_another_user_are_read(tmp_path_factory):
    """Made as root, read by nobody, from a folder that it may not write to."""
    folder = tmp_path_factory.mktemp("shared")
    closed = {path: path.stat().st_mode for path in [folder, *folder.parents] if not path.stat().st_mode & 0o001}
    encoder, cache = Encoder(), EmbeddingCache(folder, "m")
    cache(["a"], encoder)
    try:
        for path in closed:
            path.chmod(0o755)
        os.seteuid(65534)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert EmbeddingCache(folder, "m")(["a"], encoder)["pooled"].item() == ord("a")
        with pytest.warns(UserWarning, match=r"cannot be kept in .* \(Permission denied\)"):
            cache(["b"], encoder)
    finally:
        os.seteuid(0)
        for path, mode in closed.items():
            path.chmod(mode)
    assert encoder.asked == [["a"], ["b"]]


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="embedding_cache=.*file cannot be made .File exists.: give a folder"):
        EmbeddingCache(tmp_path / "file", "m")


@pytest.mark.parametrize("keep", [0, 4, 60, 0.9])
def test_a_truncated_file_is_made_again(tmp_path, keep):
    cache, encoder = EmbeddingCache(tmp_path, "m"), Encoder()
    right = cache(["a"], encoder)
    whole = cache.path("a").read_bytes()
    cache.path("a").write_bytes(whole[: int(len(whole) * keep) if keep == 0.9 else keep])
    with pytest.warns(UserWarning, match="cannot be used .*made again"):
        repaired = cache(["a"], encoder)
    assert torch.equal(repaired["text"], right["text"])
    assert torch.equal(cache(["a"], encoder)["text"], right["text"])
    assert len(encoder.asked) == 2  # the repaired file serves


def test_a_foreign_file_in_its_place_is_not_believed(tmp_path):
    cache, encoder = EmbeddingCache(tmp_path, "m"), Encoder()
    cache(["a", "b"], encoder)
    cache.path("a").write_bytes(cache.path("b").read_bytes())
    with pytest.warns(UserWarning, match="belongs to another prompt"):
        rows = cache(["a"], encoder)
    assert rows["pooled"].item() == ord("a")


def test_a_writer_that_dies_leaves_nothing_behind(tmp_path, monkeypatch):
    def dies(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("lightning_modules.policies.text_cache.os.replace", dies)
    with pytest.raises(KeyboardInterrupt):
        EmbeddingCache(tmp_path, "m")(["a"], Encoder())
    assert list(tmp_path.iterdir()) == []


def test_writers_and_readers_at_once_never_see_half_a_file(tmp_path, recwarn):
    prompts, failures = [f"prompt {k}" for k in range(4)], []
    right = Encoder()(prompts)

    def work():
        for _ in range(10):
            rows = EmbeddingCache(tmp_path, "m")(prompts, Encoder())
            if not torch.equal(rows["pooled"], right["pooled"]):
                failures.append("wrong rows")
            for path in tmp_path.glob("*.safetensors"):
                path.unlink(missing_ok=True)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert [w for w in recwarn.list if "belongs to" in str(w.message) or "header" in str(w.message).lower()] == []


WRITER = """
import sys, time, warnings
from pathlib import Path
import torch
from lightning_modules.policies.text_cache import EmbeddingCache

folder, me = Path(sys.argv[1]), sys.argv[2]
warnings.simplefilter("error")
prompts = [f"prompt {k}" for k in range(8)]
right = torch.arange(8.0)[:, None].expand(8, 5000)

def wait(*names):
    while not all((folder / name).exists() for name in names):
        time.sleep(0.001)

made = 0
def embed(asked):
    global made
    made += len(asked)
    return {"text": torch.stack([right[prompts.index(p)] for p in asked])}

for n in range(20):
    (folder / f"{me} {n}").touch()
    wait(f"0 {n}", f"1 {n}", f"2 {n}")  # all at once
    for _ in range(2):
        assert torch.equal(EmbeddingCache(folder / "cache", f"round {n}")(prompts, embed)["text"], right)
print(made)
"""


def test_processes_that_write_the_same_keys_at_once(tmp_path, repository):
    """Every row is right in each of three processes, nobody is warned of a broken file, and nothing is left over."""
    environment = os.environ | {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(me)],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for me in range(3)
    ]  # fmt: skip
    try:
        answers = [process.communicate(timeout=90) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * 3, answers
    made = [int(out) for out, _ in answers]
    assert max(made) <= 20 * 8 < sum(made)  # each row at most once per process, and some by several at once
    assert len(list((tmp_path / "cache").iterdir())) == 20 * 8

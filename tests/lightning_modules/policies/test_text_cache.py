"""The cache gives back what was encoded, for exactly that prompt and model, whatever happens to its files."""

import threading

import pytest
import torch

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

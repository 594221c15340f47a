import pytest
import torch

from datamodules.eval_batch import EvalLoader
from datamodules.prompts import Prompt

PROMPTS = [Prompt(text=text, metadata={"prompt": text, "tag": text.upper()}) for text in ("a", "b", "c")]


def rows(loader):
    return [
        (text, meta["tag"], int(prompt), int(image))
        for batch in loader
        for text, meta, prompt, image in zip(
            batch.prompts, batch.metadata, batch.prompt_index, batch.image_index, strict=True
        )
    ]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 6, 100])
def test_every_row_comes_once_in_order_whatever_the_batch_size(batch_size):
    loader = EvalLoader(PROMPTS, images_per_prompt=2, batch_size=batch_size)
    expected = [(p.text, p.text.upper(), i, j) for i, p in enumerate(PROMPTS) for j in range(2)]
    assert rows(loader) == rows(loader) == expected
    assert len(loader) == len(list(loader))


def test_the_last_batch_is_the_remainder():
    batches = list(EvalLoader(PROMPTS, images_per_prompt=3, batch_size=4))
    assert [len(batch) for batch in batches] == [4, 4, 1]
    assert batches[1].prompts == ("b", "b", "c", "c")
    assert torch.equal(batches[1].prompt_index, torch.tensor([1, 1, 2, 2]))
    assert torch.equal(batches[1].image_index, torch.tensor([1, 2, 0, 1]))


def test_a_selection_keeps_the_position_in_the_file():
    assert rows(EvalLoader(PROMPTS, images_per_prompt=1, batch_size=8, indices=[0, 2])) == [
        ("a", "A", 0, 0),
        ("c", "C", 2, 0),
    ]


@pytest.mark.parametrize("bad", ["images_per_prompt", "batch_size"])
def test_sizes_are_checked(bad):
    with pytest.raises(ValueError, match=f"{bad}=0"):
        EvalLoader(PROMPTS, **({"images_per_prompt": 1, "batch_size": 1} | {bad: 0}))

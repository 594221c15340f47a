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


@pytest.mark.parametrize("whole_batches", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_share_the_rows_and_take_as_many_batches(ranks, whole_batches):
    loaders = [
        EvalLoader(PROMPTS, images_per_prompt=3, batch_size=2, rank=r, ranks=ranks, whole_batches=whole_batches)
        for r in range(ranks)
    ]
    batches = [list(loader) for loader in loaders]
    assert len({len(mine) for mine in batches} | {len(loader) for loader in loaders}) == 1
    counted = [row for mine in batches for row in rows(batch for batch in mine if not batch.surplus)]
    assert sorted(counted) == rows(EvalLoader(PROMPTS, images_per_prompt=3, batch_size=100))


def test_whole_batches_are_cut_the_same_whatever_the_number_of_ranks():
    def cut(ranks):
        loaders = [EvalLoader(PROMPTS, 3, 2, rank=r, ranks=ranks, whole_batches=True) for r in range(ranks)]
        return {tuple(rows([batch])) for loader in loaders for batch in loader if not batch.surplus}

    assert cut(1) == cut(2) == cut(3) == cut(4)
    assert len(cut(4)) == 5


def test_a_surplus_batch_is_one_row_of_another_rank():
    (batch,) = EvalLoader(PROMPTS[:1], 1, 2, rank=1, ranks=2, whole_batches=True)
    assert batch.surplus and rows([batch]) == [("a", "A", 0, 0)]

import pytest

from datamodules.prompt_loader import PromptLoader, ResumablePromptLoader
from datamodules.prompts import Prompt
from datamodules.sampler import PromptSampler

PROMPTS = [Prompt(text=f"prompt {i}", metadata={"id": i}) for i in range(5)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_follow_the_sampler_and_carry_their_iteration(num_workers):
    sampler = PromptSampler(5, 2, iterations=6, seed=0, start=2)
    loader = PromptLoader(PROMPTS, sampler, num_workers)
    batches = list(loader)
    assert [batch.iteration for batch in batches] == [2, 3, 4, 5]
    for batch in batches:
        indices = sampler.indices(batch.iteration)
        assert batch.prompts == tuple(f"prompt {i}" for i in indices)
        assert batch.metadata == tuple({"id": i} for i in indices)
    assert len(loader) == 6


def resumable(position: int, start: int) -> tuple[ResumablePromptLoader, list[int]]:
    counter = [position]
    sampler = PromptSampler(5, 2, iterations=6, seed=0, start=start)
    return ResumablePromptLoader(PROMPTS, sampler, lambda: counter[0]), counter


def test_the_state_is_the_counter_of_the_trained_module():
    loader, counter = resumable(position=2, start=2)
    assert loader.state_dict() == {"iteration": 2}
    counter[0] = 4
    assert loader.state_dict() == {"iteration": 4}


def test_a_checkpoint_that_did_not_restore_the_counter_is_refused():
    loader, _ = resumable(position=0, start=0)
    loader.load_state_dict({"iteration": 0})
    with pytest.raises(ValueError, match="written at iteration 3 but the model's counter says 0"):
        loader.load_state_dict({"iteration": 3})


def test_the_stream_is_not_dealt_twice():
    loader, counter = resumable(position=0, start=0)
    assert len(list(loader)) == 6
    counter[0] = 6
    with pytest.raises(ValueError, match=r"dealt before.*trainer\.max_epochs: 1"):
        iter(loader)

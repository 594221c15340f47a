import pytest
import torch

from callbacks.scoring import attempt, check_rewards, score
from rewards.base import Reward
from tests.callbacks.miniature import ByPrompt, make_samples

SAMPLES = make_samples(["a", "b", "c", "d", "e"])


class OnlyAlone(Reward):
    """Works on one sample at a time, as a reward does that runs out of memory."""

    def score(self, images, prompts, metadata):
        if len(prompts) > 1:
            raise MemoryError("too many")
        return torch.ones(1)


class OneForAll(Reward):
    def score(self, images, prompts, metadata):
        return torch.zeros(2)


@pytest.mark.parametrize(("batch_size", "sizes"), [(None, [5]), (2, [2, 2, 1]), (9, [5])])
def test_scores_come_in_order_whatever_the_batches(batch_size, sizes):
    reward = ByPrompt({"a": 1.0, "b": 2.0, "c": 3.0, "d": 4.0, "e": 5.0})
    scores = score(reward, SAMPLES, name="r", when="now", batch_size=batch_size)
    assert scores.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert scores.dtype == torch.float64
    assert [len(call) for call in reward.calls] == sizes


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_score_that_is_not_finite_is_named(bad):
    with pytest.raises(
        ValueError, match=r"'r' failed in iteration 3 on prompt 'd' \(prompt 3, image 0\): score -?(nan|inf)"
    ):
        score(ByPrompt({"d": bad}), SAMPLES, name="r", when="iteration 3", batch_size=2)


def test_the_sample_that_raises_is_found_and_its_error_is_the_cause():
    error = KeyError("no such thing")
    reward = ByPrompt({"c": error})
    with pytest.raises(RuntimeError, match=r"prompt 'c' \(prompt 2, image 0\): KeyError: 'no such thing'") as raised:
        score(reward, SAMPLES, name="r", when="now")
    assert raised.value.__cause__ is error
    assert reward.calls == [tuple("abcde"), ("a",), ("b",), ("c",)]  # no further than the culprit


def test_a_wrong_number_of_scores_is_a_value_error():
    with pytest.raises(ValueError, match=r"prompt 'a'.*shape \(2,\) for 1 images"):
        score(OneForAll(), SAMPLES, name="r", when="now")


def test_a_batch_that_fails_only_as_a_whole_says_so():
    with pytest.raises(
        RuntimeError, match="a batch of prompts such as 'a', though on none of its samples alone: MemoryError"
    ):
        score(OnlyAlone(), SAMPLES, name="r", when="now")
    scores, faults = attempt(OnlyAlone(), SAMPLES)
    assert scores.tolist() == [1.0] * 5
    assert [fault.sample for fault in faults] == [None]


def test_an_attempt_loses_only_the_offending_samples():
    reward = ByPrompt({"a": 1.0, "b": ValueError("bad"), "c": float("nan"), "d": 4.0, "e": float("inf")})
    scores, faults = attempt(reward, SAMPLES)
    assert scores.isnan().tolist() == [False, True, True, False, True]
    assert (scores[0], scores[3]) == (1.0, 4.0)
    assert [(fault.sample, fault.reason) for fault in faults] == [
        (1, "ValueError: bad"),
        (2, "score nan"),
        (4, "score inf"),
    ]


def test_an_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt):
        attempt(ByPrompt({"b": KeyboardInterrupt()}), SAMPLES)


def test_rewards_are_checked():
    with pytest.raises(ValueError, match="rewards is empty"):
        check_rewards({})
    with pytest.raises(ValueError, match="'x' is a function"):
        check_rewards({"x": lambda images: images})

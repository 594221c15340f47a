import warnings

import pytest
import torch
from torch import nn

from callbacks.reward_scoring import RewardScoring
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.types import PromptBatch, Scores
from tests.callbacks.miniature import ByPrompt, MeanPixel, make_module, make_samples

SAMPLES = make_samples(["a", "b", "c", "d"])


def filled(callback):
    """One iteration of one prompt and four generations."""
    scores, module = Scores(), make_module(generations_per_prompt=4)
    callback.on_train_batch_start(None, module, PromptBatch(prompts=("a",), metadata=({},), iteration=0), 0)
    callback.on_rollout_end(None, module, SAMPLES, scores)
    return scores


def test_every_reward_fills_its_name_and_weight():
    first, second = ByPrompt({"a": 1.0}, 0.5), ByPrompt({"b": 2.0})
    scores = filled(RewardScoring({"first": first, "second": second}, {"first": 2, "second": 0}))
    assert scores.weights == {"first": 2.0, "second": 0.0}
    assert scores.values["first"].tolist() == [1.0, 0.5, 0.5, 0.5]
    assert scores.values["second"].tolist() == [0.0, 2.0, 0.0, 0.0]
    assert filled(RewardScoring({"first": first})).weights == {"first": 1.0}


def test_two_callbacks_share_the_record_but_not_a_name():
    scores = filled(RewardScoring({"x": ByPrompt({})}))
    RewardScoring({"y": ByPrompt({})}).on_rollout_end(None, make_module(), SAMPLES, scores)
    assert sorted(scores.values) == ["x", "y"]
    with pytest.raises(ValueError, match="two callbacks score a reward named 'x'"):
        RewardScoring({"x": ByPrompt({})}).on_rollout_end(None, make_module(), SAMPLES, scores)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rewards": {}}, "rewards is empty"),
        ({"weights": {"r": 1.0, "z": 1.0}}, r"unknown: \['z'\], missing: \[\]"),
        ({"weights": {}}, r"missing: \['r'\]"),
        ({"weights": {"r": 0.0}}, "are all 0"),
        ({"weights": {"r": float("nan")}}, "finite"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"on_error": "ignore"}, "'ignore'"),
        ({"max_dropped": 1.0}, r"max_dropped=1\.0"),
    ],
)
def test_arguments_are_checked(arguments, message):
    with pytest.raises(ValueError, match=message):
        RewardScoring(**({"rewards": {"r": ByPrompt({})}} | arguments))


def test_by_default_a_failure_stops_naming_reward_iteration_and_prompt():
    module = make_module()
    module.iteration = 7
    callback = RewardScoring({"r": ByPrompt({"c": OSError("disk")})})
    with pytest.raises(RuntimeError, match=r"reward 'r' failed in iteration 7 on prompt 'c' .*OSError: disk"):
        callback.on_rollout_end(None, module, SAMPLES, Scores())


def test_dropping_warns_once_with_the_count_and_keeps_counting():
    callback = RewardScoring({"r": ByPrompt({"b": float("nan"), "c": OSError("disk")}, 1.0)}, on_error="drop")
    with pytest.warns(UserWarning, match=r"prompt 'b'.*; no score for 2 of 4 samples \(2 so far\)") as caught:
        scores = filled(callback)
    assert len(caught) == 1
    assert scores.values["r"].isnan().tolist() == [False, True, True, False]
    with pytest.warns(UserWarning, match=r"\(4 so far\)"):
        filled(callback)
    assert callback.failures == {"r": 4}


def test_too_many_dropped_samples_stop():
    callback = RewardScoring({"r": ByPrompt({"a": 1.0}, float("nan"))}, on_error="drop")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="3 of the 4 samples of iteration 0 have no reward"):
        filled(callback)


def test_samples_lost_by_several_rewards_count_once_and_monitors_not_at_all():
    nan = float("nan")
    rewards = {"r": ByPrompt({"a": nan, "b": nan}), "s": ByPrompt({"b": nan}), "monitor": ByPrompt({}, nan)}
    callback = RewardScoring(rewards, {"r": 1.0, "s": 1.0, "monitor": 0.0}, on_error="drop", max_dropped=0.5)
    with pytest.warns(UserWarning):
        assert filled(callback).values["monitor"].isnan().all()


def test_an_interrupt_passes_through():
    with pytest.raises(KeyboardInterrupt):
        filled(RewardScoring({"r": ByPrompt({"a": KeyboardInterrupt()})}, on_error="drop"))


@pytest.mark.parametrize("streaming", [False, True])
def test_the_share_of_dropped_samples_is_the_iterations_not_the_calls(make_trainer, make_data, streaming):
    """One sample a call under streaming: a dropped call is not a dropped iteration."""
    changes = {"schedule": Reweight(storage="streaming")} if streaming else {}
    module = make_module(micro_batch=1, generations_per_prompt=4, **changes)
    reward = MeanPixel()
    calls = []

    def fails_on_the_first(images, prompts, metadata):
        calls.append(len(prompts))
        return images.double().flatten(1).mean(1) if len(calls) > 1 else torch.full((len(prompts),), float("nan"))

    reward.score = fails_on_the_first
    scoring = RewardScoring({"r": reward}, on_error="drop", max_dropped=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make_trainer(scoring).fit(module, datamodule=make_data(iterations=1))
    assert module.iteration_metrics["dropped_samples"] == (1.0 if streaming else 4.0)
    assert set(calls) == ({1} if streaming else {4})


def test_a_failing_reward_stops_before_the_update(make_trainer, make_data):
    module = make_module()
    before = [p.detach().clone() for p in module.policy.parameters()]
    scoring = RewardScoring({"r": ByPrompt({}, float("nan"))}, on_error="drop")
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="max_dropped"):
        make_trainer(scoring).fit(module, datamodule=make_data())
    assert all(torch.equal(a, b) for a, b in zip(before, module.policy.parameters(), strict=True))


def test_a_rewards_network_is_no_part_of_the_module(make_trainer, make_data):
    reward = MeanPixel()
    reward.network = nn.Linear(2, 2)
    module = make_module()
    keys = set(module.state_dict())
    make_trainer(RewardScoring({"r": reward})).fit(module, datamodule=make_data(iterations=1))
    assert set(module.state_dict()) == keys
    assert not any(child is reward.network for child in module.modules())

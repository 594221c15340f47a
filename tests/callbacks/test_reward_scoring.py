import threading
import warnings

import pytest
import torch
from jsonargparse import ArgumentParser
from torch import nn

from callbacks.reward_scoring import RewardScoring
from lightning_modules.advantages import GroupAdvantage
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.types import PromptBatch, Scores
from rewards.base import Reward
from tests.callbacks.miniature import PROMPTS, ByPrompt, MeanPixel, make_module, make_samples
from tests.loop import Recorder, fit
from tests.loop import module as loop_module
from tests.ranks import RankError, pool

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
        ({"routes": {"z": {"tag": "present"}}}, r"routes of \['z'\]"),
        ({"offload": True, "overlap": True}, "exclude each other"),
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


# rewards that are only monitored


class Broken(Reward):
    """Fails as it is told to: when it is loaded, or when it scores."""

    def __init__(self, loading=None, scoring=None):
        self.loading, self.scoring, self.loads, self.calls = loading, scoring, 0, 0

    def load(self):
        self.loads += 1
        if self.loading is not None:
            raise self.loading

    def score(self, images, prompts, metadata):
        self.calls += 1
        if isinstance(self.scoring, Exception):
            raise self.scoring
        return torch.full((len(images),), self.scoring or 1.0)

    def identity(self):
        self.load()
        return super().identity()


class TooMany(Reward):
    def score(self, images, prompts, metadata):
        return torch.zeros(len(images) + 1)


@pytest.mark.parametrize(
    ("monitor", "reason"),
    [
        (Broken(scoring=OSError("disk")), "OSError: disk"),
        (Broken(scoring=float("nan")), "score nan"),
        (Broken(scoring=float("inf")), "score inf"),
        (TooMany(), r"shape \(2,\) for 1 images"),
        (Broken(loading=ValueError("no file")), "ValueError: no file"),
    ],
    ids=["raises", "nan", "infinite", "wrong length", "cannot load"],
)
def test_a_monitor_never_stops_training(make_trainer, make_data, monitor, reason):
    """Whatever ``on_error`` says, and with the very gradient of a run without it."""
    recorded = {}
    for name, extra in (("with", {"m": monitor}), ("without", {})):
        torch.manual_seed(0)
        module, recorder = make_module(), Recorder()
        rewards = {"r": MeanPixel(), **extra}
        scoring = RewardScoring(rewards, dict.fromkeys(extra, 0.0) | {"r": 1.0}, on_error="raise")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make_trainer(scoring, recorder).fit(module, datamodule=make_data())
        recorded[name] = (recorder.metrics, [p.detach().clone() for p in module.policy.parameters()])
        said = [str(w.message) for w in caught if "'m'" in str(w.message)]
        assert bool(said) == bool(extra)
        if extra:
            assert any(reason.replace("\\", "") in line for line in said)
    metrics, weights = recorded["with"]
    assert all(row["reward/m"] != row["reward/m"] for row in metrics)
    assert all(row["reward/m_dropped_share"] == 1.0 for row in metrics)
    assert all(row["dropped_samples"] == 0.0 for row in metrics)
    assert all(torch.equal(a, b) for a, b in zip(weights, recorded["without"][1], strict=True))


def test_a_monitor_that_cannot_be_loaded_is_not_asked_sample_by_sample():
    monitor = Broken(loading=ValueError("no file"))
    with pytest.warns(UserWarning, match=r"no file; no score for 4 of 4"):
        filled(RewardScoring({"r": ByPrompt({}), "m": monitor}, {"r": 1.0, "m": 0.0}))
    assert (monitor.loads, monitor.calls) == (1, 0)


# before the first rollout


def test_every_reward_is_loaded_before_anything_is_rolled_out(make_trainer, make_data):
    reward, missing = Broken(), Broken(loading=ValueError("no weights; get them with `hf download x`"))
    module = make_module()
    with pytest.raises(ValueError, match=r"reward 'second' cannot be used: no weights; get them with `hf download x`"):
        make_trainer(RewardScoring({"first": reward, "second": missing})).fit(module, datamodule=make_data())
    assert (reward.loads, reward.calls) == (1, 0)
    assert module.iteration == 0


def test_a_reward_that_is_unfit_is_refused_if_asked_for(make_trainer, make_data):
    """A constant score cannot order anything; a monitor may be as it likes."""
    with pytest.raises(ValueError, match="reward 'r' cannot be used: reward Broken is refused"):
        make_trainer(RewardScoring({"r": Broken()}, check=True)).fit(make_module(), datamodule=make_data())
    make_trainer(RewardScoring({"r": Broken()})).fit(make_module(), datamodule=make_data())
    monitored = RewardScoring({"r": MeanPixel(), "m": Broken()}, {"r": 1.0, "m": 0.0})
    monitored.check = True
    with pytest.raises(ValueError, match="reward 'r' cannot be used"):  # the brightest image is blank
        make_trainer(monitored).fit(make_module(), datamodule=make_data())


def test_identities_name_what_scored():
    gone = Broken(loading=OSError("server gone"))
    identities = RewardScoring({"r": MeanPixel(), "gone": gone}).identities()
    assert identities["r"] == {"class": "tests.callbacks.miniature.MeanPixel"}
    assert identities["gone"]["class"].endswith("Broken")
    assert identities["gone"]["error"] == "server gone"


# routing


def test_a_reward_is_called_only_for_the_prompts_it_judges():
    metadata = [{"tag": "colors"}, {"text": "x"}, {"tag": "counting"}, {}]
    samples = make_samples(["a", "b", "c", "d"], metadata)
    geneval, ocr, both = (ByPrompt(dict(zip("abcd", (1.0, 2.0, 3.0, 4.0), strict=True))) for _ in range(3))
    callback = RewardScoring(
        {"geneval": geneval, "ocr": ocr, "both": both},
        routes={"geneval": {"tag": "present"}, "ocr": {"text": "present"}},
    )
    scores = Scores()
    callback.on_rollout_end(None, make_module(), samples, scores)
    assert geneval.calls == [("a", "c")]
    assert ocr.calls == [("b",)]
    assert both.calls == [("a", "b", "c", "d")]
    assert scores.applies["geneval"].tolist() == [True, False, True, False]
    assert scores.values["geneval"].nan_to_num(-1.0).tolist() == [1.0, -1.0, 3.0, -1.0]
    assert scores.values["ocr"].nan_to_num(-1.0).tolist() == [-1.0, 2.0, -1.0, -1.0]


def test_a_reward_that_judges_no_prompt_of_a_call_is_not_called_and_loses_nothing():
    reward = ByPrompt({})
    callback = RewardScoring({"r": ByPrompt({}), "s": reward}, routes={"s": {"tag": "present"}}, on_error="drop")
    scores = filled(callback)
    assert reward.calls == []
    assert not scores.applies["s"].any()
    assert callback._dropped == 0


def test_a_fault_names_the_sample_that_was_routed():
    samples = make_samples(["a", "b", "c"], [{}, {"tag": "x"}, {"tag": "y"}])
    callback = RewardScoring({"r": ByPrompt({"c": OSError("disk")})}, routes={"r": {"tag": "present"}})
    with pytest.raises(RuntimeError, match=r"prompt 'c' \(prompt 2, image 0\)"):
        callback.on_rollout_end(None, make_module(), samples, Scores())


def test_routes_can_be_written_in_a_config():
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--scoring", type=RewardScoring)
    routes = {"r": {"tag": ["colors", 2], "text": "absent"}}
    reward = {"class_path": "rewards.brightness.Brightness"}
    node = {
        "class_path": "callbacks.reward_scoring.RewardScoring",
        "init_args": {"rewards": {"r": reward}, "routes": routes},
    }
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.49
    scoring = instantiate(parser.parse_object({"scoring": node}))["scoring"]
    assert scoring.routes == routes


def test_a_prompt_that_nobody_judges_stops_the_run_before_it_begins(make_trainer, make_data):
    reward = Broken()
    colours = {"r": {"tag": ["colors"]}}
    scoring = RewardScoring({"r": reward, "m": MeanPixel()}, {"r": 1.0, "m": 0.0}, routes=colours)
    with pytest.raises(
        ValueError, match=r"4 of 6 training prompts are judged by no weighted reward, the first is 'prompt n"
    ):
        make_trainer(scoring).fit(make_module(), datamodule=make_data())
    assert reward.loads == 0
    rest = RewardScoring({"rest": MeanPixel()}, routes={"rest": {"tag": ["counting", "position"]}})
    make_trainer(scoring, rest).fit(make_module(), datamodule=make_data())  # another callback judges the others


def test_routed_training_logs_each_reward_over_its_own_prompts(make_trainer, make_data):
    tags = {row["prompt"]: row["tag"] for row in PROMPTS}
    recorder = Recorder()
    scoring = RewardScoring(
        {"colors": ByPrompt({}, 3.0), "other": MeanPixel()},
        routes={"colors": {"tag": ["colors"]}, "other": {"tag": ["counting", "position"]}},
    )
    make_trainer(scoring, recorder).fit(make_module(), datamodule=make_data(prompts_per_step=6))
    assert all(row["reward/colors"] == 3.0 and row["reward/colors_group_std"] == 0.0 for row in recorder.metrics)
    assert all(row["dropped_samples"] == 0.0 for row in recorder.metrics)
    assert all(row["advantage/zero_groups"] == pytest.approx(2 / 6) for row in recorder.metrics)
    assert {tags[prompt] for call in scoring.rewards["colors"].calls for prompt in call} == {"colors"}


# device hand-over


class Moving(MeanPixel):
    """Records where it is sent and what the policy holds while it scores."""

    def __init__(self, policy=None):
        self.policy, self.log = policy, []

    def to(self, device):
        self.log.append(("to", str(device)))

    def score(self, images, prompts, metadata):
        self.log.append(("score", sum(p.untyped_storage().nbytes() for p in self.policy.parameters())))
        return super().score(images, prompts, metadata)


@pytest.mark.parametrize("schedule", [Native, Retain, Reweight])
def test_policy_and_rewards_change_places(make_trainer, make_data, schedule, monkeypatch):
    """The CPU in the part of an accelerator: parking is exact, and nothing of the run is another."""
    outcomes = []
    for offload in (False, True):
        monkeypatch.setattr("callbacks.reward_scoring.parkable", lambda policy, offload=offload: offload)
        module = make_module(schedule=schedule())
        reward = Moving(module.policy)
        recorder = Recorder()
        make_trainer(RewardScoring({"r": reward}, offload=offload), recorder).fit(module, datamodule=make_data())
        scored = [entry for entry in reward.log if entry[0] == "score"]
        assert all((size == 0) == offload for _, size in scored)
        if offload:  # after loading, and after every scoring
            assert reward.log[0] == ("to", "cpu")
            assert reward.log[1:] == [
                entry for pair in zip(scored, [("to", "cpu")] * len(scored), strict=True) for entry in pair
            ]
        else:
            assert reward.log == scored
        outcomes.append([p.detach().clone() for p in module.policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


def test_rewards_step_aside_also_when_they_fail():
    reward = Moving(make_module().policy)
    reward.score = lambda *_: (_ for _ in ()).throw(OSError("disk"))
    with pytest.raises(RuntimeError, match="disk"):
        filled(RewardScoring({"r": reward}, offload=True))
    assert reward.log == [("to", "cpu")]


# several ranks


def test_the_share_of_dropped_samples_is_that_of_all_ranks():
    """Each of two ranks lost 2 of its 4 samples: 4 of 8."""
    module = make_module(generations_per_prompt=4)
    callback = RewardScoring({"r": ByPrompt({})}, on_error="drop", max_dropped=0.4)
    batch = PromptBatch(prompts=("a", "b"), metadata=({}, {}), iteration=0)
    callback.on_train_batch_start(None, module, batch, 0)
    nan = float("nan")
    callback.on_scores(None, module, torch.tensor([1.0, nan, 1.0, nan, 1.0, nan, 1.0]))
    with pytest.raises(ValueError, match="4 of the 8 samples of iteration 0 have no reward, more than max_dropped=0.4"):
        callback.on_scores(None, module, torch.tensor([1.0, nan, 1.0, nan, 1.0, nan, 1.0, nan]))


class FailsOnOdd(Reward):
    """No score where an image's first pixel says so."""

    def score(self, images, prompts, metadata):
        values = images.double().flatten(1).mean(1)
        return values.where((values * 1e6).round().long() % 2 == 0, torch.nan)


def drop_on_ranks(max_dropped):
    """One iteration of two prompts x 8 images -> dropped samples."""
    scoring = RewardScoring({"r": FailsOnOdd()}, on_error="drop", max_dropped=max_dropped)
    recorder = Recorder()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit(
            loop_module(generations_per_prompt=8, rank_timeout=20.0), 1, root=None, scorer=scoring, callbacks=[recorder],
            **_strategy(),
        )  # fmt: skip
    return recorder.metrics[-1]["dropped_samples"]


def _strategy():
    distributed = torch.distributed.is_initialized()
    return {"strategy": "ddp", "devices": 2, "use_distributed_sampler": False} if distributed else {}


def test_two_ranks_drop_what_one_would_and_stop_together():
    dropped = drop_on_ranks(0.99)
    assert 0 < dropped < 16
    assert pool(2).run(drop_on_ranks, 0.99) == [dropped, dropped]
    limit = (dropped - 1) / 16  # more than either rank has lost alone
    with pytest.raises(RankError) as failure:
        pool(2).run(drop_on_ranks, limit)
    assert str(failure.value).count(f"{int(dropped)} of the 16 samples of iteration 0 have no reward") == 2


# in the background


@pytest.mark.parametrize("advantage", [GroupAdvantage(clip=None), GroupAdvantage(std="global")])
@pytest.mark.parametrize("schedule", [Native, Retain, lambda: Reweight("per_sample"), Reweight])
def test_background_scoring_changes_nothing(make_trainer, make_data, schedule, advantage):
    outcomes = []
    for overlap in (False, True):
        module, recorder = make_module(schedule=schedule(), advantage=advantage), Recorder()
        scoring = RewardScoring({"r": MeanPixel(), "m": Broken(scoring=2.0)}, {"r": 1.0, "m": 0.0}, overlap=overlap)
        make_trainer(scoring, recorder).fit(module, datamodule=make_data(prompts_per_step=3))
        metrics = [
            {name: value for name, value in row.items() if not name.startswith(("seconds/", "peak_"))}
            for row in recorder.metrics
        ]
        outcomes.append((metrics, [p.detach().clone() for p in module.policy.parameters()]))
        assert module.chunks_ahead == 0  # as before
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(a, b) for a, b in zip(outcomes[0][1], outcomes[1][1], strict=True))


class WaitsForTheNext(MeanPixel):
    """Scores a chunk only once the next one of the iteration, if there is one, is rolled out."""

    def __init__(self, schedule, chunks):
        self.calls, self.threads = 0, set()
        self._begun, self._chunks, self._more = 0, chunks, threading.Condition()
        self._rollout, schedule.rollout = schedule.rollout, self._count

    def _count(self, request):
        rollout = self._rollout(request)
        with self._more:
            self._begun += 1
            self._more.notify_all()
        return rollout

    def score(self, images, prompts, metadata):
        self.calls += 1
        self.threads.add(threading.current_thread().name)
        wanted = min(self.calls + 1, -(-self.calls // self._chunks) * self._chunks)
        with self._more:
            assert self._more.wait_for(lambda: self._begun >= wanted, timeout=20), "it was waited for too early"
        return super().score(images, prompts, metadata)


@pytest.mark.parametrize("schedule", [Native, Retain, lambda: Reweight("per_sample")])
def test_the_next_chunk_is_rolled_out_while_one_is_scored(make_trainer, make_data, schedule):
    module = make_module(schedule=schedule())
    reward = WaitsForTheNext(module.schedule, chunks=3)
    make_trainer(RewardScoring({"r": reward}, overlap=True)).fit(module, datamodule=make_data(prompts_per_step=3))
    assert reward.calls == 6  # two iterations
    assert len(reward.threads) == 1 and threading.main_thread().name not in reward.threads


def test_a_failure_in_the_background_stops_before_the_update(make_trainer, make_data):
    module = make_module()
    before = [p.detach().clone() for p in module.policy.parameters()]
    scoring = RewardScoring({"r": Broken(scoring=OSError("disk"))}, overlap=True)
    with pytest.raises(RuntimeError, match="reward 'r' failed in iteration 0 .*disk"):
        make_trainer(scoring).fit(module, datamodule=make_data())
    assert all(torch.equal(a, b) for a, b in zip(before, module.policy.parameters(), strict=True))
    assert (scoring._worker, module.chunks_ahead) == (None, 0)

import random
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from jsonargparse import ArgumentParser

from callbacks.reward_scoring import RewardScoring
from rewards import endpoint
from rewards.base import Reward
from rewards.endpoint import EndpointError
from rewards.remote import RemoteReward
from rewards.serve import RewardServer
from rewards.wire import fingerprint, unpack
from tests.loop import fit, module
from tests.rewards.loopback import TOKEN, Recording, free_port, reward_server, running, scripted

pytestmark = pytest.mark.timeout(20)
HEALTH = {"protocol": 1, "identity": {"class": "C"}, "max_request_bytes": 10**6}


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("LEANGRPO_REWARD_TOKEN", TOKEN)


def client(server, **options):
    url = server if isinstance(server, str) else server.url
    return RemoteReward(url, **({"backoff_s": 0.0, "timeout_s": 5.0} | options))


def samples(count, size=2):
    """Images with the known means 0, 1/count, 2/count, ..."""
    images = (torch.arange(count) / count).reshape(-1, 1, 1, 1).expand(-1, 3, size, size)
    return images, [f"prompt {i}" for i in range(count)], [{} for _ in range(count)]


def means(count):
    return (torch.arange(count) / count).double()


def answering(change=lambda answer, number: answer, status=lambda number: 200):
    """A server that gives every sample 0.5, except for what ``change`` and ``status`` do."""
    scores_asked = []

    def script(number, handler, body):
        if handler.path == "/health":
            return 200, HEALTH
        request = unpack(body, 10**6)
        count = len(request.prompts)
        answer = {"id": request.id, "identity": fingerprint(HEALTH["identity"])}
        answer |= {"scores": [0.5] * count, "errors": [None] * count}
        scores_asked.append(request.id)
        return status(len(scores_asked) - 1), change(answer, len(scores_asked) - 1)

    return scripted(script)


@pytest.mark.parametrize("shape", [(5, 3, 4, 6), (5, 3, 2, 4, 6)])
@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_the_reward_sees_what_the_client_has(encoding, shape):
    images = torch.rand(shape, dtype=torch.float64)
    prompts, metadata = [f"Nº {i} “é” 犬" for i in range(5)], [{"i": i, "text": "ß"} for i in range(5)]
    seen = []

    class Seeing(Reward):
        def score(self, images, prompts, metadata):
            seen.append((images, list(prompts), list(metadata)))
            return torch.rand(len(prompts), dtype=torch.float64)

    with reward_server(Seeing()) as server:
        scores = client(server, encoding=encoding, batch_size=2, concurrency=1)(images, prompts, metadata)
    assert [len(call[1]) for call in seen] == [2, 2, 1]
    assert sum((call[1] for call in seen), []) == prompts
    assert sum((call[2] for call in seen), []) == metadata
    arrived = torch.cat([call[0] for call in seen])
    if encoding == "raw":
        assert torch.equal(arrived, images)
    else:
        assert (arrived - images).abs().max() <= 1 / 510 + 1e-7
    assert scores.dtype == torch.float64 and len(scores.unique()) == 5


def test_no_samples_are_no_request():
    with reward_server(reward := Recording()) as server:
        assert client(server)(torch.zeros(0, 3, 2, 2), [], []).shape == (0,)
    assert reward.scored == []


def test_scores_are_those_of_the_reward_itself_to_the_last_bit():
    images, prompts, metadata = torch.rand(7, 3, 5, 5), ["p"] * 7, [{}] * 7
    with reward_server(Recording()) as server:
        assert torch.equal(client(server)(images, prompts, metadata), Recording()(images, prompts, metadata))


def test_the_health_check_comes_before_the_first_score_and_names_the_reward():
    with reward_server(Recording()) as server:
        reward = client(server, encoding="png")
        reward.load()
        assert reward.identity() == {
            "class": "rewards.remote.RemoteReward",
            "encoding": "png",
            "served": server.identity,
        }
        assert server.identity["class"].endswith("loopback.Recording")
    reward.load()  # known already


def test_what_is_no_reward_server_is_found_before_the_first_rollout(monkeypatch):
    with pytest.raises(
        ValueError, match="no reward server to be had .*refused.* start one with `python -m rewards.serve"
    ):
        client(f"http://127.0.0.1:{free_port()}", retries=1).load()
    with reward_server(Recording()) as server:
        monkeypatch.setenv("LEANGRPO_REWARD_TOKEN", "wrong")
        with pytest.raises(ValueError, match="status 401: .*check the token"):
            client(server).load()
        with pytest.raises(ValueError, match="status 401"):
            client(server)(*samples(1))
        monkeypatch.delenv("LEANGRPO_REWARD_TOKEN")
        with pytest.raises(ValueError, match="no token for http://127.*put the one .* LEANGRPO_REWARD_TOKEN"):
            client(server).load()
    monkeypatch.setenv("LEANGRPO_REWARD_TOKEN", TOKEN)
    for answer in ({"status": "ok"}, [], HEALTH | {"protocol": 2}):
        with (
            scripted(lambda number, handler, body, answer=answer: (200, answer)) as server,
            pytest.raises(ValueError, match="is no reward server of protocol 1"),
        ):
            client(server).load()


def test_a_token_file_serves_both_sides(tmp_path, monkeypatch):
    monkeypatch.delenv("LEANGRPO_REWARD_TOKEN")
    file = tmp_path / "token"
    file.write_text("shared-secret\n")
    with reward_server(Recording(), token_file=str(file)) as server:
        assert client(server, token_file=str(file))(*samples(2)).tolist() == [0.0, 0.5]


def test_a_server_that_starts_late_is_waited_for():
    port = free_port()
    late = []

    def start():
        time.sleep(0.3)
        late.append(RewardServer(Recording(), port=port))
        late[0].serve_forever(poll_interval=0.01)

    thread = threading.Thread(target=start)
    thread.start()
    client(f"http://127.0.0.1:{port}", backoff_s=0.1, retries=6).load()
    late[0].shutdown()
    thread.join(5)
    late[0].server_close()


def test_a_sample_the_reward_fails_on_is_nan_with_the_reason():
    images, prompts, metadata = samples(4)
    metadata[1], metadata[2] = {"fault": "no face"}, {"score": "nan"}
    with (
        reward_server(Recording()) as server,
        pytest.warns(UserWarning, match="2 of 4 samples; the first, prompt 'prompt 1': ArithmeticError: no face"),
    ):
        scores = client(server)(images, prompts, metadata)
    assert scores.isnan().tolist() == [False, True, True, False]
    assert scores[[0, 3]].tolist() == [0.0, 0.75]


def test_1000_images_of_two_clients_through_a_bad_line_are_scored_once_each(monkeypatch):
    """A third of the answers is lost after scoring, and some requests before it."""
    luck = random.Random(0)
    score, lost = RewardServer.score, []

    def flaky(self, body):
        if luck.random() < 0.1:
            lost.append("before")
            raise OSError("before scoring")
        answer = score(self, body)
        if luck.random() < 0.33:
            lost.append("after")
            raise OSError("after scoring")
        return answer

    monkeypatch.setattr(RewardServer, "score", flaky)
    images, prompts, metadata = samples(1000)
    with reward_server(reward := Recording()) as server, ThreadPoolExecutor(2) as pool:
        clients = [client(server, retries=30) for _ in range(2)]
        names = [[f"{who} {prompt}" for prompt in prompts] for who in "ab"]
        scores = list(pool.map(lambda it, name: it(images, name, metadata), clients, names))
    assert lost.count("before") > 10 and lost.count("after") > 30
    assert torch.equal(scores[0], means(1000)) and torch.equal(scores[1], means(1000))
    assert sorted(reward.scored) == sorted(names[0] + names[1])  # each once


def test_a_slow_server_is_waited_for_without_scoring_twice():
    with reward_server(reward := Recording(delay_s=0.7)) as server:
        scores = client(server, timeout_s=0.25, retries=8)(*samples(2))
    assert scores.tolist() == [0.0, 0.5]
    assert reward.scored == ["prompt 0", "prompt 1"]


def test_a_server_restarted_in_the_middle_costs_nothing():
    port, count = free_port(), 40
    first, second = Recording(delay_s=0.01), Recording()
    scores = []
    with running(RewardServer(first, port=port)):
        reward = client(f"http://127.0.0.1:{port}", batch_size=1, concurrency=2, backoff_s=0.1, retries=8)
        thread = threading.Thread(target=lambda: scores.append(reward(*samples(count))))
        thread.start()
        while len(first.scored) < 5:
            time.sleep(0.005)
    time.sleep(0.1)
    with running(RewardServer(second, port=port)):
        thread.join(10)
    assert torch.equal(scores[0], means(count))
    assert 5 <= len(first.scored) < count and sorted(first.scored + second.scored) == sorted(samples(count)[1])


def test_500_then_recovery():
    with answering(status=lambda number: 500 if number < 2 else 200) as server:
        assert client(server)(*samples(3)).tolist() == [0.5] * 3
    assert len(server.seen) == 4
    assert len({body for path, _, body in server.seen if path == "/score"}) == 1  # the very same request


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda answer, number: b"<html>oops</html>", "no JSON.*oops"),
        (lambda answer, number: answer | {"scores": [0.5]}, "unusable answer: scores: 1 for 3 samples"),
        (lambda answer, number: answer | {"scores": [0.5, float("nan"), 0.5]}, "NaN is no JSON"),
        (lambda answer, number: answer | {"scores": [0.5, None, 0.5]}, "sample 1 has score None and error None"),
        (lambda answer, number: answer | {"id": "other"}, "no answer to this request"),
        (lambda answer, number: answer | {"identity": "other"}, "no longer the one it began with"),
    ],
)
def test_an_unusable_answer_is_a_clear_error_and_no_reason_to_ask_again(change, message):
    with answering(change) as server, pytest.raises(EndpointError, match=message):
        client(server)(*samples(3))
    assert [path for path, _, _ in server.seen] == ["/health", "/score"]


def test_a_request_that_fails_for_good_costs_only_its_own_samples():
    with (
        answering(lambda answer, number: b"garbage" if number == 1 else answer) as server,
        pytest.warns(UserWarning, match="2 of 6 samples; the first, prompt 'prompt 2': .*no JSON"),
    ):
        scores = client(server, batch_size=2, concurrency=1)(*samples(6))
    assert scores.isnan().tolist() == [False, False, True, True, False, False]


def test_requests_keep_within_the_servers_size_and_the_clients_concurrency():
    images, prompts, metadata = samples(9, size=40)  # 19,200 bytes each
    with reward_server(reward := Recording(delay_s=0.02), max_request_bytes=110_000, thread_safe=True) as server:
        assert torch.allclose(client(server, batch_size=9, concurrency=2)(images, prompts, metadata), means(9))
        assert max(len(call) for call in reward.images) == 2
        assert reward.most_inside <= 2
        large = torch.rand(1, 3, 100, 100)
        with pytest.raises(ValueError, match="takes 120000 bytes, .* accepts 110000: raise its max.*, or send png"):
            client(server)(large, ["p"], [{}])
        assert client(server, encoding="png")(large, ["p"], [{}]).shape == (1,)
        with pytest.raises(EndpointError, match="status 413.*lower batch_size"):
            client(server)(images[:1], ["p"], [{"notes": "x" * 200_000}])


def test_metadata_that_cannot_be_sent_is_the_callers_error():
    with reward_server(Recording()) as server, pytest.raises(ValueError, match="cannot be sent as UTF-8 JSON"):
        client(server)(torch.zeros(1, 3, 2, 2), ["p"], [{"image": object()}])


def test_a_proxy_in_the_environment_is_not_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    with reward_server(Recording()) as server:
        assert client(server, retries=0)(*samples(2)).tolist() == [0.0, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"encoding": "pickle"}, "encoding='pickle'"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"concurrency": 0}, "concurrency=0"),
        ({"timeout_s": -1.0}, "timeout_s=-1.0"),
        ({"url": "localhost:80"}, "url 'localhost:80'"),
    ],
)
def test_arguments_are_checked(options, message):
    with pytest.raises(ValueError, match=message):
        RemoteReward(**({"url": "http://localhost:1"} | options))


@pytest.mark.parametrize("name", ["remote", "vlm"])
def test_the_configuration_makes_the_callback(name, repository: Path):
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--scoring", type=RewardScoring)
    config = yaml.safe_load((repository / "configs" / "reward" / f"{name}.yaml").read_text())
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.49
    scoring = instantiate(parser.parse_object({"scoring": config}))["scoring"]
    assert scoring.rewards[name].endpoint.url == config["init_args"]["rewards"][name]["init_args"]["url"]


def train(reward, root, **options):
    """Two iterations of two prompts and four images each."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(module(), 2, root=root, scorer=RewardScoring({"remote": reward}, **options))


def test_training_is_the_same_as_with_the_reward_at_hand(tmp_path):
    with reward_server(Recording()) as server:
        apart = train(client(server), tmp_path)
    for one, other in zip(apart, train(Recording(), tmp_path), strict=True):
        names = [name for name in one if not name.startswith(("seconds/", "peak_memory"))]
        assert "reward/remote" in names and "grad_norm" in names
        assert [one[name] for name in names] == [other[name] for name in names]


def test_training_goes_on_through_failures_that_pass(tmp_path):
    with answering(status=lambda number: 503 if number % 2 == 0 else 200) as server:
        metrics = train(client(server), tmp_path)
    assert [m["reward/remote"] for m in metrics] == [0.5, 0.5]


def missing_one(answer, number):
    answer["scores"][0], answer["errors"][0] = None, "no face"
    return answer


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_failed_sample_stops_training_or_is_dropped(on_error, tmp_path):
    with answering(missing_one) as server:
        if on_error == "raise":
            with pytest.raises(ValueError, match="reward 'remote' failed in iteration 0 on prompt .*: score nan"):
                train(client(server), tmp_path)
        else:
            metrics = train(client(server), tmp_path, on_error="drop")
            assert [m["dropped_samples"] for m in metrics] == [2.0, 2.0]  # one of each group


@pytest.mark.parametrize("on_error", ["raise", "drop"])
def test_a_server_that_dies_stops_training_soon_and_says_why(on_error, tmp_path):
    """In its first iteration; without the endpoint's rest, dropping would wait out the retries of every sample."""

    def dead(number, handler, body):
        return (200, HEALTH) if handler.path == "/health" else handler.connection.close()

    said = {
        "raise": r"reward 'remote' failed in iteration 0 .*\(3 attempts\)",
        "drop": "8 of the 8 samples of iteration 0",
    }
    with scripted(dead) as server:
        with pytest.raises((ValueError, RuntimeError), match=said[on_error]):
            train(client(server, retries=2, batch_size=8), tmp_path, on_error=on_error)
        assert [path for path, _, _ in server.seen] == ["/health"] + ["/score"] * 3


def test_dropping_goes_on_once_the_server_is_back(tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint, "REST_S", 0.0)
    # the first group of 4, then each of its samples alone
    with answering(status=lambda number: 500 if number < 5 else 200) as server:
        metrics = train(client(server, retries=0), tmp_path, on_error="drop")
    assert [m["dropped_samples"] for m in metrics] == [4.0, 0.0]

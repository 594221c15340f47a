import contextlib
import http.client
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rewards.remote import RemoteReward
from rewards.serve import Memory, Refusal, RewardServer, main
from rewards.wire import ScoreRequest, pack
from tests.rewards.loopback import TOKEN, Recording, reward_server

pytestmark = pytest.mark.timeout(20)
HEADERS = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture(autouse=True)
def token(monkeypatch):
    monkeypatch.setenv("LEANGRPO_REWARD_TOKEN", TOKEN)


def ask(server, method, path, body=None, headers=HEADERS):
    """(status, parsed answer) by another client than the product's."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=5)
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def packed(id="one", prompts=("a", "b"), metadata=None, value=0.5):
    images = torch.full((len(prompts), 3, 2, 2), value)
    return pack(ScoreRequest(id=id, images=images, prompts=prompts, metadata=metadata or ({},) * len(prompts)), "raw")


def talk(server, text, shut=True, wait_s=5):
    """Send raw bytes, return all that comes back."""
    with socket.create_connection(server.server_address[:2], timeout=wait_s) as connection:
        connection.sendall(text)
        if shut:
            connection.shutdown(socket.SHUT_WR)
        data = b""
        while chunk := connection.recv(65536):
            data += chunk
        return data


def test_health_and_score():
    with reward_server(Recording()) as server:
        status, health = ask(server, "GET", "/health")
        assert (status, health["protocol"]) == (200, 1)
        assert health["identity"]["class"].endswith("Recording")
        status, answer = ask(server, "POST", "/score", packed(metadata=({}, {"score": 0.1})))
    assert status == 200
    assert answer["scores"] == [0.5, 0.1]
    assert answer["errors"] == [None, None]
    assert answer["id"] == "one"


@pytest.mark.parametrize(
    "shown", [None, b"", b"Bearer", b"Bearer wrong", TOKEN.encode(), f"Bearer {TOKEN}x".encode(), b"Bearer \xe9"]
)
def test_without_the_token_nothing_is_said_or_scored(shown):
    headers = {} if shown is None else {"Authorization": shown}
    with reward_server(reward := Recording()) as server:
        for method, path, body in (("GET", "/health", None), ("POST", "/score", packed()), ("GET", "/other", None)):
            status, answer = ask(server, method, path, body, headers)
            assert (status, list(answer)) == (401, ["error"])
            assert TOKEN not in answer["error"]
    assert reward.scored == []


def test_a_token_is_made_up_if_none_is_given_and_only_loopback_is_bound(monkeypatch):
    monkeypatch.delenv("LEANGRPO_REWARD_TOKEN")
    with reward_server(Recording()) as first, reward_server(Recording()) as second:
        assert first.token_is_generated and len(first.token) >= 32 and first.token != second.token
        assert first.server_address[0] == "127.0.0.1"
        assert ask(first, "GET", "/health", headers={"Authorization": f"Bearer {second.token}"})[0] == 401
        assert ask(first, "GET", "/health", headers={"Authorization": f"Bearer {first.token}"})[0] == 200


class Trap:
    """Pickled, it would write a file."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return (open, (str(self.file), "w"))


def test_a_malformed_request_is_refused_with_the_reason(tmp_path):
    with reward_server(reward := Recording()) as server:
        for body, reason in (
            (b"garbage", "no safetensors file"),
            (pickle.dumps(Trap(tmp_path / "trap")), "no safetensors file"),
            (packed(value=2.0), "expected [0, 1]"),
        ):
            status, answer = ask(server, "POST", "/score", body)
            assert status == 400 and reason in answer["error"]
        for method, path in (("GET", "/score"), ("POST", "/health"), ("GET", "/")):
            status, answer = ask(server, method, path)
            assert status == 404 and "POST /score" in answer["error"]
        assert ask(server, "POST", "/score", packed())[0] == 200  # still at work
    assert not (tmp_path / "trap").exists()
    assert reward.scored == ["a", "b"]


def test_an_oversize_request_is_refused_even_while_it_is_sent():
    with reward_server(reward := Recording(), max_request_bytes=1000) as server:
        status, answer = ask(server, "POST", "/score", b"x" * 20_000_000)
        assert (status, answer["error"]) == (
            413,
            "a body of 20000000 bytes, at most 1000 are accepted: send fewer samples at a time",
        )
        head = f"POST /score HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\n"
        assert b" 413 " in talk(server, f"{head}Content-Length: {'9' * 5000}\r\n\r\n".encode())
        for length in ("", "Content-Length: -5\r\n", "Content-Length: five\r\n", "Transfer-Encoding: chunked\r\n"):
            assert b" 411 " in talk(server, f"{head}{length}\r\n".encode())
    assert reward.scored == []


def test_a_truncated_or_stalled_body_is_not_scored():
    body = packed()
    head = f"POST /score HTTP/1.1\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with reward_server(reward := Recording(), read_timeout_s=0.3) as server:
        said = talk(server, head + body[:-7])
        assert b" 400 " in said and f"ended after {len(body) - 7} of {len(body)} bytes".encode() in said
        said = talk(server, head + body[:-7], shut=False)
        assert b" 408 " in said and b"no data for 0.3 s" in said
        assert talk(server, b"", shut=False) == b""  # a silent client is let go
    assert reward.scored == []


def test_the_same_request_is_scored_once():
    with reward_server(reward := Recording()) as server:
        first = ask(server, "POST", "/score", packed())
        assert ask(server, "POST", "/score", packed()) == first
        assert reward.scored == ["a", "b"]
        status, answer = ask(server, "POST", "/score", packed(value=0.25))
        assert status == 409 and "'one' belongs to another request" in answer["error"]
        assert ask(server, "POST", "/score", packed(id="two"))[1]["scores"] == first[1]["scores"]
    assert reward.scored == ["a", "b", "a", "b"]


def test_a_repetition_waits_for_the_first():
    with reward_server(reward := Recording(delay_s=0.3), thread_safe=True) as server, ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: ask(server, "POST", "/score", packed()), range(4)))
    assert reward.scored == ["a", "b"] and answers[0][0] == 200 and answers.count(answers[0]) == 4


def test_the_oldest_answers_are_forgotten_and_failures_at_once():
    memory, calls = Memory(2), []

    def compute(name):
        calls.append(name)
        if name == "bad":
            raise OSError("disk")
        return {"scores": [len(calls)]}

    def answer(name):
        return memory.answer(name, b"", lambda: compute(name))

    for name in "abcb":
        answer(name)
    assert calls == ["a", "b", "c"]
    answer("a")
    assert calls == ["a", "b", "c", "a"]
    for _ in range(2):
        with pytest.raises(OSError, match="disk"):
            answer("bad")
    assert calls[-2:] == ["bad", "bad"]
    with pytest.raises(Refusal):
        memory.answer("a", b"other", dict)


def test_a_sample_that_fails_fails_alone():
    metadata = ({}, {"fault": "no face"}, {"score": "inf"}, {"score": -2.0})
    with reward_server(Recording()) as server:
        status, answer = ask(server, "POST", "/score", packed(prompts=tuple("abcd"), metadata=metadata))
    assert (status, answer["scores"]) == (200, [0.5, None, None, -2.0])
    assert answer["errors"] == [None, "ArithmeticError: no face", "score inf", None]


@pytest.mark.parametrize(("thread_safe", "most"), [(False, 1), (True, 2)])
def test_a_reward_is_called_by_one_thread_at_a_time_unless_it_is_safe(thread_safe, most):
    with (
        reward_server(reward := Recording(delay_s=0.25), thread_safe=thread_safe) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        codes = pool.map(lambda i: ask(server, "POST", "/score", packed(id=str(i)))[0], range(2))
        assert list(codes) == [200] * 2
    assert reward.most_inside == most


def test_too_many_at_a_time_are_asked_to_come_again():
    with (
        reward_server(reward := Recording(delay_s=0.5), max_pending=1, read_timeout_s=0.1) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        first = pool.submit(ask, server, "POST", "/score", packed(id="first"))
        assert reward.started.wait(5)
        status, answer = ask(server, "POST", "/score", packed(id="second"))
        assert status == 429 and "come again" in answer["error"]
        assert first.result()[0] == 200
        assert ask(server, "POST", "/score", packed(id="second"))[0] == 200


def test_a_fault_of_the_server_is_500_and_not_the_end(monkeypatch):
    with reward_server(Recording()) as server:
        monkeypatch.setattr(server, "score", lambda body: 1 / 0)
        assert ask(server, "POST", "/score", packed()) == (500, {"error": "ZeroDivisionError: division by zero"})
        assert ask(server, "GET", "/health")[0] == 200


@pytest.mark.parametrize(
    "options", [{"max_request_bytes": 0}, {"max_pending": 0}, {"remembered": 0}, {"read_timeout_s": 0}]
)
def test_arguments_are_checked(options):
    with pytest.raises(ValueError, match="|".join(options)):
        RewardServer(Recording(), **options)


def test_the_reward_is_loaded_before_the_port_is_taken():
    class Missing(Recording):
        def load(self):
            raise ValueError("no weights")

    with pytest.raises(ValueError, match="no weights"):
        RewardServer(Missing(), port=0)


def test_a_config_without_a_reward_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--port", "0"])
    assert "reward" in capsys.readouterr().err


OWN_REWARD = """
import time, torch
from pathlib import Path
from rewards.base import Reward

class Own(Reward):
    def __init__(self, delay_s: float):
        self.delay_s = delay_s

    def score(self, images, prompts, metadata):
        Path(metadata[0]["file"]).touch()
        time.sleep(self.delay_s)
        return torch.ones(len(prompts))
"""


@pytest.fixture(scope="module")
def processes(repository, tmp_path_factory):
    """Two servers of a user's own reward, by the documented command: (process, address, token) each."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "my_rewards.py").write_text(OWN_REWARD)
    (folder / "server.yaml").write_text("reward:\n  class_path: my_rewards.Own\n  init_args: {delay_s: 1.0}\nport: 0\n")
    environment = os.environ | {"PYTHONPATH": str(repository), "OMP_NUM_THREADS": "1"}
    environment.pop("LEANGRPO_REWARD_TOKEN", None)
    command = [sys.executable, "-m", "rewards.serve", "--config", "server.yaml"]
    started = [
        subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    try:
        yield [(process, *announced(process)) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def announced(process):
    lines = [process.stdout.readline().split() for _ in range(2)]
    assert lines[0][:2] == ["serving", "my_rewards.Own"]
    return lines[0][-1], lines[1][-1]


def under_way(server, tmp_path, monkeypatch, number):
    """Score one image on a server process and deliver the signal ``number`` while that is under way."""
    process, url, token = server
    monkeypatch.setenv("LEANGRPO_REWARD_TOKEN", token)
    reward = RemoteReward(url, retries=0, timeout_s=10)
    reward.load()
    marker, found = tmp_path / "started", []

    def score():
        try:
            found.append(reward(torch.rand(1, 3, 2, 2), ["p"], [{"file": str(marker)}]).tolist())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=score)
    thread.start()
    end = time.monotonic() + 5
    while not marker.exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(number)
    thread.join(10)
    return found[0], process.wait(10)


@pytest.mark.timeout(180)
def test_sigterm_answers_what_was_accepted_and_ends(processes, tmp_path, monkeypatch):
    assert under_way(processes[0], tmp_path, monkeypatch, signal.SIGTERM) == ([1.0], 0)


@pytest.mark.timeout(180)
def test_a_killed_server_is_a_clear_error(processes, tmp_path, monkeypatch):
    error, code = under_way(processes[1], tmp_path, monkeypatch, signal.SIGKILL)
    assert code == -signal.SIGKILL
    assert isinstance(error, RuntimeError) and "/score: " in str(error) and "(1 attempts)" in str(error)


def test_a_server_that_cannot_start_says_so_in_a_line():
    reward = ["--reward", "rewards.brightness.Brightness"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        with pytest.raises(SystemExit, match=f"cannot serve rewards.brightness.Brightness on port {port}: .*in use"):
            main([*reward, "--port", port])
    with pytest.raises(SystemExit, match="cannot serve .*target.*three numbers"):
        main([*reward, "--reward.target", "[2, 0, 0]", "--port", "0"])

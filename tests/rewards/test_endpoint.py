import json
import time
from types import SimpleNamespace

import pytest
import urllib3

from rewards import endpoint as module
from rewards.credentials import read_token
from rewards.endpoint import Endpoint, EndpointError, UnreachableError, proxy_for
from tests.rewards.loopback import free_port, scripted

pytestmark = pytest.mark.timeout(20)


def client(server, **options):
    return Endpoint(server if isinstance(server, str) else server.url, **({"backoff_s": 0.0, "timeout_s": 5} | options))


def cut_short(number, handler, body):
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"half":')


def hang_up(number, handler, body):
    handler.connection.close()


def once_then(first, second):
    return lambda number, handler, body: (first if number == 0 else second)(number, handler, body)


def say(status, content):
    return lambda number, handler, body: (status, content)


GOOD = say(200, {"fine": 1})


@pytest.mark.parametrize("first", [say(500, {"error": "x"}), say(503, b""), say(429, b""), cut_short, hang_up])
def test_what_may_pass_is_tried_again_with_the_same_body(first):
    with scripted(once_then(first, GOOD)) as server:
        assert client(server).request("POST", "/x", b"body") == {"fine": 1}
    assert [body for _, _, body in server.seen] == [b"body", b"body"]


@pytest.mark.parametrize(
    ("status", "content", "message"),
    [
        (400, {"error": "bad shape"}, "/x: status 400: bad shape$"),
        (401, {"error": "who?"}, r"status 401: who\? \(check the token\)"),
        (404, b"<html>", "status 404: '<html>' .check the address"),
        (413, {"error": {"message": "too much"}}, "status 413: too much .lower batch_size"),
        (302, b"", "status 302"),
        (200, b"\x00garbage\xff", "answers what is no JSON .*garbage"),
        (200, b'{"score": NaN}', "NaN is no JSON"),
        (200, b"[" * 100_000, "answers what is no JSON"),
    ],
)
def test_what_no_retry_would_change_is_final(status, content, message):
    with scripted(say(status, content)) as server, pytest.raises(EndpointError, match=message):
        client(server).request("POST", "/x", b"")
    assert len(server.seen) == 1


def test_retries_are_bounded_and_then_the_endpoint_rests(monkeypatch):
    with scripted(say(500, {"error": "boom"})) as server:
        it = client(server, retries=2)
        with pytest.raises(UnreachableError, match=r"/x: status 500: boom \(3 attempts\)"):
            it.request("GET", "/x")
        with pytest.raises(UnreachableError, match="boom.*not tried again for now"):
            it.request("GET", "/x")
        assert len(server.seen) == 3
        monkeypatch.setattr(module, "REST_S", 0.0)
        it = client(server, retries=0)
        for _ in range(2):
            with pytest.raises(UnreachableError):
                it.request("GET", "/x")
        assert len(server.seen) == 5


def test_nobody_listens():
    with pytest.raises(UnreachableError, match="refused"):
        client(f"http://127.0.0.1:{free_port()}", retries=1).request("GET", "/")


def test_a_slow_server_is_given_up_in_time():
    def slow(number, handler, body):
        time.sleep(2)
        return 200, {}

    def dripping(number, handler, body):
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(40):
            handler.wfile.write(b" ")
            time.sleep(0.05)

    for script in (slow, dripping):
        with scripted(script) as server:
            begin = time.monotonic()
            with pytest.raises(UnreachableError, match="timed out|took more than"):
                client(server, retries=1, timeout_s=0.2).request("GET", "/")
            assert 0.4 <= time.monotonic() - begin < 1.9 and len(server.seen) == 2


def test_an_endless_answer_is_cut_off(monkeypatch):
    monkeypatch.setattr(module, "LONGEST_ANSWER", 1000)
    with scripted(say(200, b" " * 100_000)) as server, pytest.raises(EndpointError, match="more than 1000 bytes"):
        client(server).request("GET", "/")


def test_the_wait_doubles_with_jitter_and_heeds_the_server(monkeypatch):
    waits = []
    monkeypatch.setattr(module, "time", SimpleNamespace(sleep=waits.append, monotonic=time.monotonic))
    with pytest.raises(UnreachableError):
        client(f"http://127.0.0.1:{free_port()}", retries=7, backoff_s=1.0).request("GET", "/")
    assert len(waits) == 7
    for k, wait in enumerate(waits):
        assert min(2**k, 30) / 2 <= wait <= min(2**k, 30)
    assert len({wait / min(2**k, 30) for k, wait in enumerate(waits)}) > 1

    waits.clear()

    def busy(number, handler, body):
        if number == 2:
            return 200, {}
        handler.send_response(429)
        handler.send_header("Retry-After", ["7", "900"][number])
        handler.end_headers()

    with scripted(busy) as server:
        client(server).request("GET", "/")
    assert waits == [7.0, 30.0]


def test_waiting_leaves_the_global_random_numbers_alone():
    import random

    state = random.getstate()
    with scripted(once_then(say(500, b""), GOOD)) as server:
        client(server).request("GET", "/")
    assert random.getstate() == state


def test_proxies_are_for_others_than_loopback(monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody
    monkeypatch.setenv("no_proxy", "inside.example")
    assert proxy_for("http://outside.example:1/v1") == "http://127.0.0.1:9"
    assert proxy_for("https://outside.example") == "http://127.0.0.1:9"
    for url in ("http://inside.example", "http://localhost:1", "http://127.0.0.2:1", "http://[::1]:1"):
        assert proxy_for(url) is None
    assert isinstance(Endpoint("http://outside.example")._pool, urllib3.ProxyManager)
    with scripted(GOOD) as server:
        assert client(server, retries=0).request("GET", "/") == {"fine": 1}


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:80", "ftp://x", "http://", "http://x:y", "http://x:0", "http://a:b@x", "http://x/?a=1", "http://[1"],
)
def test_addresses_are_checked(url):
    with pytest.raises(ValueError, match="expected http://host:port"):
        Endpoint(url)


@pytest.mark.parametrize("options", [{"timeout_s": 0}, {"retries": -1}, {"backoff_s": -1}, {"connections": 0}])
def test_arguments_are_checked(options):
    with pytest.raises(ValueError, match="|".join(options)):
        Endpoint("http://x", **options)


def test_the_token_travels_in_the_header_and_comes_from_file_or_environment(tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text("from-file\n")
    monkeypatch.setenv("SOME_TOKEN", "from-env")
    assert read_token(env="SOME_TOKEN", file=None) == "from-env"
    assert read_token(env="SOME_TOKEN", file=str(file)) == "from-file"
    assert read_token(env="ANOTHER_TOKEN", file=None) is None
    with scripted(GOOD) as server:
        it = client(server)
        it.token = "abc"
        it.request("POST", "/x", json.dumps({}).encode())
    assert server.seen[0][1]["Authorization"] == "Bearer abc"


@pytest.mark.parametrize("content", ["", "two words", "line\nline", "ключ"])
def test_an_unusable_token_is_refused_unseen(content, tmp_path, monkeypatch):
    file = tmp_path / "token"
    file.write_text(content, encoding="utf-8")
    with pytest.raises(ValueError, match="token_file .* holds no usable token") as raised:
        read_token(env=None, file=str(file))
    assert not content or content not in str(raised.value)
    monkeypatch.setenv("SOME_TOKEN", content)
    with pytest.raises(ValueError, match="SOME_TOKEN holds no usable token"):
        read_token(env="SOME_TOKEN", file=None)
    with pytest.raises(ValueError, match="cannot be read"):
        read_token(env=None, file=str(tmp_path / "nothing"))

"""Serve a reward over HTTP, for :mod:`rewards.remote`: ``python -m rewards.serve --config server.yaml``.

Any :class:`~rewards.base.Reward` can be served, one of your own as well. ImageReward, say, whose package needs an older
transformers: make an environment with that package, torch, torchvision, safetensors, urllib3 and
``jsonargparse[signatures]``, install this project in it without its dependencies (``pip install --no-deps``), and write a
file ``my_rewards.py``::

    import torch
    from rewards.base import Reward
    from rewards.images import as_pil

    class ImageReward(Reward):
        def __init__(self, version: str = "ImageReward-v1.0", device: str = "cuda"):
            self.version, self.device = version, device

        def load(self):
            import ImageReward  # https://github.com/THUDM/ImageReward
            self.model = ImageReward.load(self.version, device=self.device)

        def identity(self):
            return super().identity() | {"version": self.version}

        def score(self, images, prompts, metadata):
            return torch.tensor([self.model.score(p, x) for p, x in zip(prompts, as_pil(images))])

and a ``server.yaml`` beside it::

    reward:
      class_path: my_rewards.ImageReward
      init_args: {device: "cuda:1"}
    port: 8765

HPSv3 and VideoAlign (a reward of videos, ``[N, 3, F, H, W]``) are served the same way. The server loads the reward, prints its
address and, unless one is given, the token it made up; SIGTERM or Ctrl-C makes it finish what it has accepted and exit.

The wire format is :mod:`rewards.wire`. Every request must carry the token. A request id that the server has seen gets the
answer it got then, or waits for it, so a repeated request is not scored twice. A sample on which the reward raises, or whose
score is not finite, is answered by the reason. Status 400: malformed, 401: no or another token, 408: the body stopped
coming, 409: an id used for another body, 411: no length, 413: too large, 429: too many at a time, 500: a fault of the server.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import math
import secrets
import signal
import socketserver
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from http.server import BaseHTTPRequestHandler
from typing import Any

from jsonargparse import ArgumentParser

from rewards.base import Reward
from rewards.credentials import read_token
from rewards.endpoint import is_loopback
from rewards.fan_out import Outcome
from rewards.wire import PROTOCOL, ScoreRequest, fingerprint, pack_answer, unpack

_log = logging.getLogger(__name__)


class Refusal(Exception):
    """A request that is not served: its HTTP status, and why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Memory:
    """The latest answers by request id: the same id is computed once, also while its first request is under way.

    Args:
        capacity: answers kept; the oldest go first.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[str, tuple[bytes, Future[dict[str, Any]]]] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, id: str, body: bytes, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """``compute()`` of the first request named ``id``. If that raises, it raises for all who wait, and is forgotten.

        Errors: :class:`Refusal` (409) if ``body`` is not the one that ``id`` came with at first.
        """
        digest = hashlib.sha256(body).digest()
        with self._lock:
            known = self._entries.get(id)
            future = Future() if known is None else known[1]
            if known is None:
                self._entries[id] = (digest, future)
        if known is not None:
            if known[0] != digest:
                raise Refusal(409, f"the id {id!r} belongs to another request: give every request an id of its own")
            return future.result()
        try:
            future.set_result(compute())
        except BaseException as error:
            with self._lock:
                del self._entries[id]
            future.set_exception(error)
            raise
        self._forget()
        return future.result()

    def _forget(self) -> None:
        with self._lock:
            finished = [id for id, (_, future) in self._entries.items() if future.done()]
            for id in finished[: max(0, len(finished) - self.capacity)]:
                del self._entries[id]


class RewardServer(socketserver.ThreadingTCPServer):
    """Serve ``reward``; bound at construction, serving in ``serve_forever``.

    Args:
        reward: what scores; it is loaded first.
        host: address to listen on. The default is reachable from this machine alone; another one is not encrypted.
        port: 0 takes a free one.
        token_env: environment variable with the token that clients must show; a token is made up if it is not set.
        token_file: file with the token; wins over ``token_env``.
        thread_safe: whether the reward may be called by several threads at a time; else calls wait for one another.
        max_request_bytes: largest body, and most image values in a request.
        max_pending: score requests read or scored at a time; others wait for a place.
        remembered: answers kept for repeated requests.
        read_timeout_s: seconds a client may be silent while it sends, or wait for a place before it is asked to come
            again (429).

    Errors: ``ValueError`` on unusable arguments; whatever the reward's ``load`` raises; ``OSError`` if the address is
    taken.
    """

    allow_reuse_address = True
    daemon_threads = False  # closing the server waits for the answers under way
    request_queue_size = 128

    def __init__(
        self,
        reward: Reward,
        host: str = "127.0.0.1",
        port: int = 8765,
        token_env: str = "LEANGRPO_REWARD_TOKEN",
        token_file: str | None = None,
        thread_safe: bool = False,
        max_request_bytes: int = 512 * 2**20,
        max_pending: int = 16,
        remembered: int = 4096,
        read_timeout_s: float = 30.0,
    ) -> None:
        limits = {"max_request_bytes": max_request_bytes, "max_pending": max_pending, "remembered": remembered}
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"{name}={value}: give at least 1")
        if not read_timeout_s > 0:
            raise ValueError(f"read_timeout_s={read_timeout_s}: give a number of seconds above 0")
        given = read_token(env=token_env, file=token_file)
        self.token = given or secrets.token_urlsafe(32)
        self.token_is_generated = given is None
        self.reward, self.max_request_bytes, self.read_timeout_s = reward, max_request_bytes, read_timeout_s
        self.slots = threading.BoundedSemaphore(max_pending)
        self.memory = Memory(remembered)
        self._turn: AbstractContextManager[Any] = nullcontext() if thread_safe else threading.Lock()
        reward.load()
        self.identity = json.loads(json.dumps(reward.identity()))  # as clients see it
        self.fingerprint = fingerprint(self.identity)
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """The address that is listened on."""
        host, port = self.server_address[:2]
        return f"http://{host}:{port}"

    def health(self) -> dict[str, Any]:
        """What ``GET /health`` answers."""
        return {"protocol": PROTOCOL, "identity": self.identity, "max_request_bytes": self.max_request_bytes}

    def score(self, body: bytes) -> dict[str, Any]:
        """What ``POST /score`` answers. Errors: :class:`Refusal`."""
        try:
            request = unpack(body, self.max_request_bytes)
        except ValueError as error:
            raise Refusal(400, str(error)) from error

        def compute() -> dict[str, Any]:
            with self._turn:
                return pack_answer(request, score_each(self.reward, request), self.fingerprint)

        return self.memory.answer(request.id, body, compute)

    def accepts(self, header: str | None) -> bool:
        """Whether an ``Authorization`` header shows the token; compared in constant time."""
        return hmac.compare_digest((header or "").encode(), f"Bearer {self.token}".encode())

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.warning("connection with %s ended early", client_address, exc_info=True)


def score_each(reward: Reward, request: ScoreRequest) -> list[Outcome]:
    """One score or reason per sample. Where the reward raises on a batch, each sample is scored alone."""
    return _score_rows(reward, request, range(len(request.prompts)))


def _score_rows(reward: Reward, request: ScoreRequest, part: range) -> list[Outcome]:
    rows = slice(part.start, part.stop)
    try:
        scores = reward(request.images[rows], request.prompts[rows], request.metadata[rows]).tolist()
    except Exception as error:
        if len(part) != 1:
            return [outcome for i in part for outcome in _score_rows(reward, request, range(i, i + 1))]
        _log.exception("the reward failed on prompt %r", request.prompts[part.start])
        return [f"{type(error).__name__}: {error}"[:1000]]
    return [score if math.isfinite(score) else f"score {score}" for score in scores]


class _Handler(BaseHTTPRequestHandler):
    """One connection, one request (HTTP/1.0)."""

    server: RewardServer  # type: ignore[assignment]
    server_version, sys_version = "rewards.serve", ""

    def setup(self) -> None:
        super().setup()
        self.connection.settimeout(self.server.read_timeout_s)

    def do_GET(self) -> None:
        self._respond(self._health)

    def do_POST(self) -> None:
        self._respond(self._score)

    def _health(self) -> dict[str, Any]:
        self._check("/health")
        return self.server.health()

    def _score(self) -> dict[str, Any]:
        self._check("/score")
        if not self.server.slots.acquire(timeout=self.server.read_timeout_s):
            raise Refusal(429, "too many requests at a time: come again")
        try:
            return self.server.score(self._body())
        finally:
            self.server.slots.release()

    def _check(self, path: str) -> None:
        if not self.server.accepts(self.headers.get("Authorization")):
            raise Refusal(401, "this server asks for its token, as 'Authorization: Bearer <token>'")
        if self.path != path:
            raise Refusal(404, f"nothing at {self.command} {self.path[:200]}: there are GET /health and POST /score")

    def _body(self) -> bytes:
        length, limit = self.headers.get("Content-Length", ""), self.server.max_request_bytes
        if not (length.isascii() and length.isdecimal()):
            raise Refusal(411, f"Content-Length {length!r}: give the body's length in bytes")
        if len(length) > 18 or int(length) > limit:
            raise Refusal(
                413, f"a body of {length[:18]} bytes, at most {limit} are accepted: send fewer samples at a time"
            )
        try:
            body = self.rfile.read(int(length))
        except TimeoutError:
            raise Refusal(408, f"no data for {self.server.read_timeout_s} s") from None
        if len(body) != int(length):
            raise Refusal(400, f"the body ended after {len(body)} of {length} bytes")
        return body

    def _respond(self, answer: Callable[[], dict[str, Any]]) -> None:
        try:
            status, content = 200, answer()
        except Refusal as refusal:
            status, content = refusal.status, {"error": str(refusal)}
        except Exception as error:
            _log.exception("a fault of the server")
            status, content = 500, {"error": f"{type(error).__name__}: {error}"[:1000]}
        data = json.dumps(content, allow_nan=False).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("Connection", "close")
        if status == 429:
            self.send_header("Retry-After", "1")
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.end_headers()
        self.wfile.write(data)
        if status != 200:
            self._drain()

    def _drain(self) -> None:
        """Read on for a moment: a client still sending would meet a reset in place of the answer."""
        end = time.monotonic() + 2.0
        self.connection.settimeout(0.5)
        with suppress(OSError):
            while time.monotonic() < end and self.rfile.read1(2**16):  # type: ignore[attr-defined]
                pass

    def log_message(self, format: str, *args: Any) -> None:
        _log.debug("%s %s", self.address_string(), format % args)


def serve(server: RewardServer) -> None:
    """Serve until SIGTERM or SIGINT, then finish the requests accepted. A second signal ends the process at once."""

    def stop(number: int, frame: Any) -> None:
        signal.signal(number, signal.SIG_DFL)
        threading.Thread(target=server.shutdown).start()  # it waits for the loop that this thread runs

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with server:
        server.serve_forever(poll_interval=0.1)


def main(args: Sequence[str] | None = None) -> None:
    """The command: see the module docstring. A port that is taken, or a reward that cannot be made, ends it with one line."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    parser = ArgumentParser(prog="python -m rewards.serve", description="Serve a reward over HTTP.")
    parser.add_argument("--config", action="config", help="YAML file of settings")
    parser.add_class_arguments(RewardServer, None)
    config = parser.parse_args(None if args is None else list(args))
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.49
    try:
        objects = instantiate(config)
        server = RewardServer(**{name: value for name, value in objects.items() if name != "config"})
    except (ValueError, OSError) as error:
        raise SystemExit(f"cannot serve {config.reward.class_path} on port {config.port}: {error}") from error
    kind = server.identity.get("class", type(server.reward).__qualname__)
    print(f"serving {kind} at {server.url}", flush=True)
    if server.token_is_generated:
        print(f"token, made up for this run (the client reads {config.token_env}): {server.token}", flush=True)
    if not is_loopback(str(server.server_address[0])):
        print("reachable from other machines, without encryption: keep it inside a trusted network", flush=True)
    serve(server)


if __name__ == "__main__":
    main()

"""Loopback servers that misbehave on demand, and one that is the real thing."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from rewards.base import Reward
from rewards.serve import RewardServer

TOKEN = "loopback-token"


class Recording(Reward):
    """The mean pixel, or the sample's ``metadata["score"]``; ``metadata["fault"]`` raises. Remembers what it scored."""

    def __init__(self, delay_s=0.0):
        self.delay_s, self.scored, self.images = delay_s, [], []
        self.inside = self.most_inside = 0
        self.started = threading.Event()

    def score(self, images, prompts, metadata):
        self.inside += 1
        self.most_inside = max(self.most_inside, self.inside)
        self.started.set()
        try:
            time.sleep(self.delay_s)
            if any("fault" in row for row in metadata):
                raise ArithmeticError(next(row["fault"] for row in metadata if "fault" in row))
            self.scored += prompts
            self.images.append(images)
            means = images.double().flatten(1).mean(1)
            scores = [float(row.get("score", m)) for row, m in zip(metadata, means.tolist(), strict=True)]
            return torch.tensor(scores, dtype=torch.float64)
        finally:
            self.inside -= 1


@contextlib.contextmanager
def running(server):
    """Serve in a thread; on leaving, stop and wait."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join(5)
        server.server_close()


def reward_server(reward, **options):
    """A real server on a free port; the token is read from the environment."""
    return running(RewardServer(reward, **({"port": 0, "read_timeout_s": 5.0} | options)))


class Scripted(ThreadingHTTPServer):
    """Answers with ``script(number, handler, body)``: a (status, content) pair, content JSON or bytes, or ``None`` where
    the script has dealt with the connection itself. ``seen`` keeps (path, headers, body) of every request."""

    daemon_threads = True

    def __init__(self, script):
        self.script, self.seen = script, []
        super().__init__(("127.0.0.1", 0), _ScriptedHandler)

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"


class _ScriptedHandler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.seen.append((self.path, self.headers, body))
        answer = None
        with contextlib.suppress(ConnectionError):  # the client has gone
            answer = self.server.script(len(self.server.seen) - 1, self, body)
        if answer is not None:
            status, content = answer
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(data)

    do_GET = do_POST

    def log_message(self, format, *args):
        pass


def scripted(script):
    return running(Scripted(script))


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]

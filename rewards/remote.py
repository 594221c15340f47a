"""A reward that runs elsewhere: in another environment, on another accelerator, on another machine.

For rewards whose packages cannot live beside this project's (ImageReward, HPSv3, VideoAlign), or whose networks should
not share the trainer's memory. The other side is :mod:`rewards.serve`, whose docstring holds an example, or any server that
speaks :mod:`rewards.wire`.

What can go wrong, and what becomes of it:

===============================================  ====================================================================
no connection, time-out, cut answer, 429, 5xx    tried again with the same request id, see :mod:`rewards.endpoint`; a server
                                                 that got it the first time sends the answer it has, or will have
the reward fails on a sample                     this sample's score is NaN, with a warning; the others keep theirs
some requests fail for good                      NaN for their samples, with a warning; the other requests' scores stay
all requests fail for good                       ``EndpointError``
===============================================  ====================================================================

``callbacks.reward_scoring.RewardScoring`` stops at NaN and errors alike, or drops those samples, as its ``on_error`` says.
A server that lost its memory (it was restarted) scores a repeated request anew, and its answer is the only one used.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, get_args

from torch import Tensor

from rewards.base import Reward
from rewards.credentials import read_token
from rewards.endpoint import HEALTH_TIMEOUT_S, Endpoint, EndpointError
from rewards.fan_out import Outcome, score_parts
from rewards.wire import PROTOCOL, Encoding, ScoreRequest, fingerprint, pack, unpack_answer

_HEAD_BYTES = 2**16  # kept free in a request for prompts and metadata


class RemoteReward(Reward):
    """Score on a reward server.

    Args:
        url: of the server, such as ``http://127.0.0.1:8765``. Plain http is not encrypted: to another machine go through
            an ssh tunnel, or https.
        token_env: environment variable with the server's token.
        token_file: file with the token; wins over ``token_env``.
        encoding: ``raw``: bit for bit; ``png``: rounded to 8 bits, smaller.
        batch_size: samples per request; fewer where the server's size limit asks for it.
        concurrency: requests under way at a time.
        timeout_s: seconds until an attempt is given up; longer than the server takes for ``concurrency`` requests.
        retries: attempts after the first.
        backoff_s: wait before the first retry, in seconds; doubled every time.

    Errors: ``ValueError`` on unusable arguments; from :meth:`load`, without a token or a server; ``EndpointError`` from
    scoring, see the module docstring.
    """

    def __init__(
        self,
        url: str,
        token_env: str = "LEANGRPO_REWARD_TOKEN",
        token_file: str | None = None,
        encoding: Encoding = "raw",
        batch_size: int = 8,
        concurrency: int = 4,
        timeout_s: float = 120.0,
        retries: int = 4,
        backoff_s: float = 1.0,
    ) -> None:
        if encoding not in get_args(Encoding):
            raise ValueError(f"encoding={encoding!r}: choose one of {get_args(Encoding)}")
        if batch_size < 1 or concurrency < 1:
            raise ValueError(f"batch_size={batch_size}, concurrency={concurrency}: give at least 1 of each")
        self.endpoint = Endpoint(
            url, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s, connections=concurrency
        )
        self.token_env, self.token_file = token_env, token_file
        self.encoding: Encoding = encoding
        self.batch_size, self.concurrency = batch_size, concurrency
        self._health: dict[str, Any] | None = None

    def load(self) -> None:
        """Find the server, show it the token, and learn what it serves. Errors: ``ValueError`` naming the remedy."""
        if self._health is not None:
            return
        url = self.endpoint.url
        self.endpoint.token = read_token(env=self.token_env, file=self.token_file)
        if self.endpoint.token is None:
            raise ValueError(f"no token for {url}: put the one its server printed into the variable {self.token_env}")
        try:
            health = self.endpoint.request("GET", "/health", timeout_s=min(self.endpoint.timeout_s, HEALTH_TIMEOUT_S))
        except EndpointError as error:
            raise ValueError(
                f"no reward server to be had ({error}): start one with `python -m rewards.serve --config ...` and give "
                "its address and token"
            ) from error
        match health:
            case {"protocol": int(version), "identity": dict(), "max_request_bytes": int()} if version == PROTOCOL:
                self._health = health
            case _:
                raise ValueError(f"{url} is no reward server of protocol {PROTOCOL}: it answers {str(health)[:200]}")

    def identity(self) -> dict[str, Any]:
        """The class, the encoding, and the served reward's own identity."""
        return super().identity() | {"encoding": self.encoding, "served": self._served["identity"]}

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """``images [N, 3, H, W]`` or ``[N, 3, F, H, W]``, float in [0, 1] -> scores [N] float64, NaN where the reward
        failed."""
        name, size = fingerprint(self._served["identity"]), self._samples_per_request(images)
        pixels = images.detach().cpu()

        def call(part: range) -> list[Outcome]:
            rows = slice(part.start, part.stop)
            request = ScoreRequest(
                id=uuid.uuid4().hex,
                images=pixels[rows],
                prompts=tuple(prompts[rows]),
                metadata=tuple(metadata[rows]),
            )
            body = pack(request, self.encoding)
            answer = self.endpoint.request("POST", "/score", body, "application/octet-stream")
            try:
                return unpack_answer(answer, request, name)
            except ValueError as error:
                raise EndpointError(f"{self.endpoint.url}/score gives an unusable answer: {error}") from error

        parts = [range(start, min(start + size, len(images))) for start in range(0, len(images), size)]
        return score_parts(call, parts, prompts, workers=self.concurrency, who=f"reward at {self.endpoint.url}")

    @property
    def _served(self) -> dict[str, Any]:
        self.load()
        assert self._health is not None
        return self._health

    def _samples_per_request(self, images: Tensor) -> int:
        limit, values = self._served["max_request_bytes"], images[:1].numel()
        # an incompressible PNG is a little larger than its pixels
        sample = values * images.element_size() if self.encoding == "raw" else int(values * 1.05) + 4096
        fitting = (limit - _HEAD_BYTES) // max(1, sample)
        if fitting < 1:
            raise ValueError(
                f"one sample of shape {tuple(images.shape[1:])} takes {sample} bytes, the server at {self.endpoint.url} "
                f"accepts {limit}: raise its max_request_bytes" + (", or send png" if self.encoding == "raw" else "")
            )
        return min(self.batch_size, fitting)

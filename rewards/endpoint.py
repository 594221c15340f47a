"""JSON over HTTP with time-outs and bounded retries: the line between this machine and a reward that runs elsewhere.

Only what may pass is tried again: no connection, a time-out, an answer cut short, status 429 and 5xx. Before retry
``k = 0, 1, ...`` the client waits ``u min(b 2^k, 30 s)`` with ``b = backoff_s`` and ``u`` uniform in [1/2, 1], or as long
as the server's ``Retry-After`` asks (at most 30 s): exponential back-off with "equal jitter" (Brooker 2015, AWS
Architecture Blog, "Exponential Backoff And Jitter"). Every other 4xx, a redirect, or an answer that is no JSON is final.

Once all retries are used up the endpoint rests: for :data:`REST_S` seconds every further request fails at once. So a
dead server costs a caller that asks sample by sample one round of waiting, and not one per sample.

The environment's proxies (``http_proxy``, ``https_proxy``, ``no_proxy``) are honoured, except for loopback addresses.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import random
import time
import urllib.request
from functools import cached_property
from typing import Any
from urllib.parse import urlsplit

import urllib3

REST_S = 30.0
"""How long an endpoint rests after a request failed for good, in seconds."""
HEALTH_TIMEOUT_S = 10.0
"""Enough for one attempt of a question that takes no computing, in seconds."""
LONGEST_WAIT_S = 30.0
LONGEST_ANSWER = 16 * 2**20  # bytes
_HINTS = {
    401: "check the token",
    403: "check the token",
    404: "check the address",
    413: "lower batch_size, or raise the server's limit",
}
_log = logging.getLogger(__name__)
_jitter = random.Random()  # a generator of its own: training's must not depend on the network's moods


class EndpointError(RuntimeError):
    """A request failed for good; the message names the address and the reason."""


class UnreachableError(EndpointError):
    """The server does not answer, or keeps failing, after all retries."""


class _PassingError(Exception):
    """A failure worth another attempt. ``wait_s``: what the server asks for, in seconds, 0 = nothing."""

    def __init__(self, reason: str, wait_s: float = 0.0) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


class Endpoint:
    """A server's base address. Safe to use from several threads.

    Args:
        url: ``http://`` or ``https://``, host, port and base path, without query or user name.
        timeout_s: seconds one attempt may take to connect and send, then until the answer begins, then until it ends.
        retries: attempts after the first.
        backoff_s: ``b`` of the module docstring, in seconds.
        connections: connections kept open.

    Errors: ``ValueError`` naming the unusable argument.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_s: float = 120.0,
        retries: int = 4,
        backoff_s: float = 1.0,
        connections: int = 4,
    ) -> None:
        self.url = check_url(url)
        if not timeout_s > 0:
            raise ValueError(f"timeout_s={timeout_s}: give a number of seconds above 0")
        if retries < 0 or not backoff_s >= 0:
            raise ValueError(f"retries={retries}, backoff_s={backoff_s}: neither may be negative")
        if connections < 1:
            raise ValueError(f"{connections} connections: give at least 1")
        self.timeout_s, self.retries, self.backoff_s, self.connections = timeout_s, retries, backoff_s, connections
        self.token: str | None = None
        """Sent as ``Authorization: Bearer <token>``."""
        self._failure, self._resting_until = "", 0.0

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "application/json",
        timeout_s: float | None = None,
    ) -> Any:
        """The parsed JSON of the answer. ``body`` is sent unchanged at every attempt; ``timeout_s`` in place of the
        endpoint's own.

        Errors: :class:`UnreachableError` after the last retry or while the endpoint rests; :class:`EndpointError`
        on an answer that no retry would change.
        """
        if time.monotonic() < self._resting_until:
            raise UnreachableError(f"{self._failure}; not tried again for now")
        for attempt in range(self.retries + 1):
            try:
                return self._once(method, self.url + path, body, content_type, timeout_s or self.timeout_s)
            except _PassingError as error:
                reason, asked = str(error), error.wait_s
            if attempt < self.retries:
                wait = self._wait_s(attempt, asked)
                _log.warning("%s%s: %s; trying again in %.1f s", self.url, path, reason, wait)
                time.sleep(wait)
        self._failure = f"{self.url}{path}: {reason} ({self.retries + 1} attempts)"
        self._resting_until = time.monotonic() + REST_S
        raise UnreachableError(self._failure)

    def _wait_s(self, attempt: int, asked: float) -> float:
        wait = min(self.backoff_s * 2.0**attempt, LONGEST_WAIT_S) * _jitter.uniform(0.5, 1.0)
        return max(wait, min(asked, LONGEST_WAIT_S))

    def _once(self, method: str, url: str, body: bytes | None, content_type: str, timeout_s: float) -> Any:
        headers = {"Accept": "application/json", "Content-Type": content_type}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        try:
            response = self._pool.request(
                method, url, body=body, headers=headers, retries=False, redirect=False, preload_content=False,
                timeout=urllib3.Timeout(connect=timeout_s, read=timeout_s),
            )  # fmt: skip
            try:
                content = _read(response, url, timeout_s)
            finally:
                response.close()
        except urllib3.exceptions.SSLError as error:
            raise EndpointError(f"{url}: {error}") from error
        except urllib3.exceptions.HTTPError as error:
            raise _PassingError(f"{type(error).__name__}: {error}") from error
        return _judge(url, response, content)

    @cached_property
    def _pool(self) -> urllib3.PoolManager:
        options: dict[str, Any] = {"maxsize": self.connections, "block": False}
        proxy = proxy_for(self.url)
        return urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)


def check_url(url: str) -> str:
    """``url`` without a slash at its end. Errors: ``ValueError`` unless it is a plain base address."""
    try:
        parts = urlsplit(url)
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        raise ValueError(f"url {url!r}: expected http://host:port or https://host/path") from None
    if not sound or parts.query or parts.fragment or parts.username is not None:
        raise ValueError(
            f"url {url!r}: expected http://host:port or https://host/path, without query, fragment or user name"
        )
    return url.rstrip("/")


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine's own address."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def proxy_for(url: str) -> str | None:
    """The environment's proxy for ``url``; never one for a loopback address."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    if is_loopback(host) or urllib.request.proxy_bypass(host):
        return None
    return urllib.request.getproxies().get(parts.scheme)


def _read(response: urllib3.BaseHTTPResponse, url: str, timeout_s: float) -> bytes:
    """The whole answer, within its time and size."""
    end, content = time.monotonic() + timeout_s, bytearray()
    while chunk := response.read1(65536):
        content += chunk
        if len(content) > LONGEST_ANSWER:
            raise EndpointError(f"{url} answers more than {LONGEST_ANSWER} bytes: is this the right server?")
        if time.monotonic() > end:
            raise _PassingError(f"the answer took more than {timeout_s} s")
    return bytes(content)


def _judge(url: str, response: urllib3.BaseHTTPResponse, content: bytes) -> Any:
    status = response.status
    if 200 <= status < 300:
        return _parse(url, content)
    said = f"status {status}: {_message(content)}"
    if status == 429 or status >= 500:
        asked = response.headers.get("Retry-After", "")
        raise _PassingError(said, float(asked) if asked.isdecimal() else 0.0)
    hint = _HINTS.get(status)
    raise EndpointError(f"{url}: {said}" + (f" ({hint})" if hint else ""))


def _parse(url: str, content: bytes) -> Any:
    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(content, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise EndpointError(f"{url} answers what is no JSON ({error}): {_excerpt(content)}") from error


def _message(content: bytes) -> str:
    """What a server says about a failure: its ``error``, or the answer's beginning."""
    try:
        said = json.loads(content)["error"]
        return str(said["message"] if isinstance(said, dict) else said)[:500]
    except (ValueError, KeyError, TypeError, RecursionError):
        return _excerpt(content)


def _excerpt(content: bytes) -> str:
    return repr(content[:200].decode("utf-8", errors="replace"))

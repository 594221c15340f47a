r"""A vision-language model as judge, behind any endpoint that speaks OpenAI's chat completions (vLLM, SGLang, a provider).

Every sample is one conversation: the images as PNG data URLs (8 bits a value), then the filled-in template, temperature 0.
The answer's number ``a`` in ``[low, high]`` becomes the score ``(a - low) / (high - low)`` in [0, 1]. No number, one outside
the range, or an answer cut at ``max_tokens`` is a failure of this sample: NaN, with a warning. An attempt that timed out
may have been computed; a chat endpoint cannot tell, but one answer per sample is used.

UnifiedReward (Wang et al. 2025, arXiv:2503.05236) or Qwen-VL, for instance: ``vllm serve Qwen/Qwen2.5-VL-7B-Instruct``,
``url: http://127.0.0.1:8000/v1``, ``model: Qwen/Qwen2.5-VL-7B-Instruct``. A judge's number means something under its own
template alone: take the template its authors trained it with.
"""

from __future__ import annotations

import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from rewards.base import Reward
from rewards.credentials import read_token
from rewards.endpoint import HEALTH_TIMEOUT_S, Endpoint, EndpointError
from rewards.fan_out import Outcome, score_parts
from rewards.png import data_url


class AnswerParser(ABC):
    """Finds the number in a judge's answer."""

    @abstractmethod
    def parse(self, answer: str) -> float:
        """The number. Errors: ``ValueError`` if there is none."""


class RegexParser(AnswerParser):
    r"""The group ``score`` of a regular expression; of several matches the last, which a judge that argues first means.

    Args:
        pattern: such as ``Final score:\s*(?P<score>-?\d+(\.\d+)?)``; letter case does not matter.

    Errors: ``ValueError`` on a pattern that does not compile or has no group of that name.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self.pattern = re.compile(pattern, re.IGNORECASE)
        except re.error as error:
            raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error
        if "score" not in self.pattern.groupindex:
            raise ValueError(f"pattern {pattern!r} has no group (?P<score>...) for the number")

    def parse(self, answer: str) -> float:
        found = [match["score"] for match in self.pattern.finditer(answer) if match["score"] is not None]
        if not found:
            raise ValueError(f"no match of {self.pattern.pattern!r}")
        return _number(found[-1])


class JsonParser(AnswerParser):
    """A field of a JSON object in the answer, whatever stands around it; of several objects with the field the last.

    Args:
        field: the key; its value is a number or the text of one.
    """

    def __init__(self, field: str = "score") -> None:
        self.field = field

    def parse(self, answer: str) -> float:
        found = [value[self.field] for value in _objects(answer) if self.field in value]
        if not found:
            raise ValueError(f"no JSON object with the key {self.field!r}")
        return _number(found[-1])


class VLMJudge(Reward):
    """Ask a vision-language model for a number.

    Args:
        url: the endpoint's base address, up to and including ``/v1``.
        model: the model's name at the endpoint.
        template: the question; every ``{prompt}`` in it becomes the sample's prompt, other braces stay.
        parser: finds the number in the answer.
        low, high: the range of that number, of which ``high`` is the best.
        system: a system message, or ``None``.
        max_tokens: longest answer.
        frames_every: of a video the frames 0, n, 2n, ... are shown.
        api_key_env: environment variable with the endpoint's key; ``None``: it needs none.
        concurrency: questions under way at a time.
        timeout_s: seconds until an attempt is given up.
        retries: attempts after the first.
        backoff_s: wait before the first retry, in seconds; doubled every time.

    Errors: ``ValueError`` on unusable arguments; from :meth:`load`, without the key, the endpoint or the model;
    ``EndpointError`` from scoring if not one question gets an answer.
    """

    def __init__(
        self,
        url: str,
        model: str,
        template: str,
        parser: AnswerParser,
        low: float,
        high: float,
        system: str | None = None,
        max_tokens: int = 512,
        frames_every: int = 4,
        api_key_env: str | None = None,
        concurrency: int = 8,
        timeout_s: float = 120.0,
        retries: int = 4,
        backoff_s: float = 1.0,
    ) -> None:
        if "{prompt}" not in template:
            raise ValueError(f"template {template!r} has no {{prompt}}: the judge would not see what was asked for")
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ValueError(f"low={low}, high={high}: expected finite numbers, low below high")
        for name, value in {"max_tokens": max_tokens, "frames_every": frames_every, "concurrency": concurrency}.items():
            if value < 1:
                raise ValueError(f"{name}={value}: give at least 1")
        self.endpoint = Endpoint(
            url, timeout_s=timeout_s, retries=retries, backoff_s=backoff_s, connections=concurrency
        )
        self.model, self.template, self.parser, self.low, self.high = model, template, parser, low, high
        self.system, self.max_tokens, self.frames_every = system, max_tokens, frames_every
        self.api_key_env, self.concurrency = api_key_env, concurrency
        self._loaded = False

    def load(self) -> None:
        """Find the endpoint, and the model in its list. Errors: ``ValueError`` naming the remedy."""
        if self._loaded:
            return
        self.endpoint.token = read_token(env=self.api_key_env, file=None)
        if self.api_key_env is not None and self.endpoint.token is None:
            raise ValueError(f"the environment variable {self.api_key_env} is not set: put the endpoint's key into it")
        url = self.endpoint.url
        try:
            listed = self.endpoint.request("GET", "/models", timeout_s=min(self.endpoint.timeout_s, HEALTH_TIMEOUT_S))
        except EndpointError as error:
            raise ValueError(
                f"no judge to be had ({error}): start its server, and give the address up to /v1"
            ) from error
        try:
            names = [entry["id"] for entry in listed["data"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{url}/models is no list of models: {str(listed)[:200]}") from error
        if self.model not in names:
            raise ValueError(f"{url} serves no {self.model!r}, but {names[:20]}")
        self._loaded = True

    def identity(self) -> dict[str, Any]:
        """The class and everything that shapes a score."""
        parser = {"class": type(self.parser).__qualname__} | {
            name: getattr(value, "pattern", value) for name, value in vars(self.parser).items()
        }
        names = ("model", "template", "low", "high", "system", "max_tokens", "frames_every")
        return super().identity() | {"parser": parser} | {name: getattr(self, name) for name in names}

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """``images [N, 3, H, W]`` or ``[N, 3, F, H, W]``, float in [0, 1] -> scores [N] float64 in [0, 1], NaN where the
        judge gave no usable answer."""
        self.load()
        pixels = images.detach().cpu()

        def call(part: range) -> list[Outcome]:
            body = json.dumps(self._question(pixels[part.start], prompts[part.start])).encode()
            return [self._grade(self.endpoint.request("POST", "/chat/completions", body))]

        parts = [range(sample, sample + 1) for sample in range(len(prompts))]
        return score_parts(call, parts, prompts, workers=self.concurrency, who=f"judge {self.model}")

    def _question(self, image: Tensor, prompt: str) -> dict[str, Any]:
        frames = [image] if image.ndim == 3 else list(image[:, :: self.frames_every].unbind(1))
        content = [{"type": "image_url", "image_url": {"url": data_url(frame)}} for frame in frames]
        text = {"type": "text", "text": self.template.replace("{prompt}", prompt)}
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return {
            "model": self.model,
            "messages": [*system, {"role": "user", "content": [*content, text]}],
            "temperature": 0,
            "max_tokens": self.max_tokens,
        }

    def _grade(self, completion: Any) -> Outcome:
        """A score in [0, 1], or why there is none."""
        try:
            choice = completion["choices"][0]
            answer = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            return f"no chat completion: {str(completion)[:200]}"
        if not isinstance(answer, str):
            return f"the answer is no text: {answer!r:.200}"
        if choice.get("finish_reason") == "length":
            return f"the answer was cut at max_tokens={self.max_tokens}: {answer[-200:]!r}"
        try:
            number = self.parser.parse(answer)
        except ValueError as error:
            return f"unusable answer ({error}): {answer[-200:]!r}"
        if not self.low <= number <= self.high:
            return f"{number} lies outside [{self.low}, {self.high}]: {answer[-200:]!r}"
        return (number - self.low) / (self.high - self.low)


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in ``text``, outermost ones, in order."""
    decoder, found, at = json.JSONDecoder(), [], text.find("{")
    while at >= 0:
        try:
            value, end = decoder.raw_decode(text, at)
            found.append(value)
        except (ValueError, RecursionError):
            end = at + 1
        at = text.find("{", end)
    return found


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{value!r} is no number")
    try:
        return float(value)
    except OverflowError as error:  # a whole number in JSON has no bound
        raise ValueError(f"{value!r:.40}... is too large a number") from error

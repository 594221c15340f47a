"""What travels between a reward client and a reward server: safetensors one way, JSON the other, never pickle.

``POST /score`` carries one safetensors file (``application/octet-stream``) with the tensors

``request``
    uint8, the bytes of a UTF-8 JSON object: ``id`` (a string that names this request, the same at every attempt),
    ``shape`` (of the images), ``prompts`` (N strings), ``metadata`` (N objects).
``images``
    encoding ``raw``: ``[N, 3, H, W]`` or ``[N, 3, F, H, W]``, floating, in [0, 1], bit for bit what the client has.
``png.0``, ``png.1``, ...
    encoding ``png``, in place of ``images``: uint8, the bytes of one PNG file per image, or per frame in the order sample,
    frame. Values are rounded to 8 bits (:mod:`rewards.png`) and arrive as float32; a quarter of the bytes or less.

and is answered by ``{"id", "identity", "scores", "errors"}``: N numbers or nulls, N nulls or reasons, of every sample
exactly one; ``identity`` is the :func:`fingerprint` of what scored. ``GET /health`` is answered by ``{"protocol",
"identity", "max_request_bytes"}``, here with the full identity. A request that is refused: ``{"error": reason}``.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from safetensors.torch import load, save
from torch import Tensor

from rewards.base import check_images
from rewards.fan_out import Outcome
from rewards.png import decode_png, encode_png

PROTOCOL = 1
Encoding = Literal["raw", "png"]


@dataclass(frozen=True, kw_only=True)
class ScoreRequest:
    """Samples to score."""

    id: str
    images: Tensor
    """``[N, 3, H, W]`` or ``[N, 3, F, H, W]``, floating, in [0, 1]."""
    prompts: tuple[str, ...]
    metadata: tuple[dict[str, Any], ...]


def pack(request: ScoreRequest, encoding: Encoding) -> bytes:
    """A request's body. Errors: ``ValueError`` on metadata or a prompt that is no JSON."""
    head = {
        "id": request.id,
        "shape": list(request.images.shape),
        "prompts": request.prompts,
        "metadata": request.metadata,
    }
    try:
        text = json.dumps(head, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError) as error:  # UnicodeEncodeError is a ValueError
        raise ValueError(
            f"the prompts or the metadata cannot be sent as UTF-8 JSON ({error}): keep to text, finite numbers, lists and "
            "objects"
        ) from error
    tensors = {"request": _as_tensor(text)}
    if encoding == "raw":
        tensors["images"] = request.images.detach().cpu().contiguous()
    else:
        tensors |= {f"png.{i}": _as_tensor(encode_png(frame)) for i, frame in enumerate(_frames(request.images))}
    return save(tensors)


def unpack(body: bytes, max_bytes: int) -> ScoreRequest:
    """The request in ``body``, whose images may be at most ``max_bytes`` at 8 bits a value.

    Errors: ``ValueError`` naming what is wrong.
    """
    try:
        tensors = load(body)
    except Exception as error:  # the library's own class, KeyError and ValueError alike
        raise ValueError(f"the body is no safetensors file ({error})") from error
    head = _head(tensors.pop("request", None))
    shape, prompts, metadata = head["shape"], head["prompts"], head["metadata"]
    if not _is_list(shape, int) or len(shape) not in (4, 5) or min(shape) < 0:
        raise ValueError(f"shape {shape!r}: expected [N, 3, H, W] or [N, 3, F, H, W]")
    if math.prod(shape) > max_bytes:
        raise ValueError(f"images of shape {shape} hold more than {max_bytes} values: send fewer at a time")
    if not isinstance(head["id"], str) or not 1 <= len(head["id"]) <= 128:
        raise ValueError(f"id {str(head['id'])[:200]!r}: expected a string of 1 to 128 characters")
    if not _is_list(prompts, str) or not _is_list(metadata, dict) or not len(prompts) == len(metadata) == shape[0]:
        raise ValueError(f"prompts and metadata must list {shape[0]} strings and {shape[0]} objects, one per image")
    images = _images(tensors, shape)
    check_images(images)
    return ScoreRequest(id=head["id"], images=images, prompts=tuple(prompts), metadata=tuple(metadata))


def pack_answer(request: ScoreRequest, outcomes: Sequence[Outcome], identity: str) -> dict[str, Any]:
    """The JSON that answers ``request``."""
    return {
        "id": request.id,
        "identity": identity,
        "scores": [None if isinstance(outcome, str) else outcome for outcome in outcomes],
        "errors": [outcome if isinstance(outcome, str) else None for outcome in outcomes],
    }


def unpack_answer(answer: Any, request: ScoreRequest, identity: str) -> list[Outcome]:
    """One score or reason per sample of ``request``. Errors: ``ValueError`` on an answer to another request, of another
    reward, of another length, or with anything but one finite number or one reason per sample."""
    if not isinstance(answer, dict) or answer.get("id") != request.id:
        raise ValueError(f"no answer to this request: {str(answer)[:200]}")
    if answer.get("identity") != identity:
        raise ValueError("the server's reward is no longer the one it began with: its scores would not be comparable")
    scores, errors = answer.get("scores"), answer.get("errors")
    count = len(request.prompts)
    for name, values in (("scores", scores), ("errors", errors)):
        if not isinstance(values, list) or len(values) != count:
            held = len(values) if isinstance(values, list) else f"no list ({str(values)[:80]})"
            raise ValueError(f"{name}: {held} for {count} samples")
    assert isinstance(scores, list) and isinstance(errors, list)
    return [_outcome(sample, score, error) for sample, (score, error) in enumerate(zip(scores, errors, strict=True))]


def fingerprint(identity: dict[str, Any]) -> str:
    """A short name for an identity: equal identities have equal ones."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True, allow_nan=False).encode()).hexdigest()[:16]


def _outcome(sample: int, score: Any, error: Any) -> Outcome:
    if score is None and isinstance(error, str) and error:
        return error
    if error is None and isinstance(score, int | float) and not isinstance(score, bool):
        value = float(score) if abs(score) < 1e300 else math.inf  # a whole number in JSON has no bound
        if math.isfinite(value):
            return value
    raise ValueError(
        f"sample {sample} has score {score!r} and error {error!r}: expected one finite number or one reason"
    )


def _head(tensor: Tensor | None) -> dict[str, Any]:
    if tensor is None or tensor.dtype != torch.uint8:
        raise ValueError("the body has no uint8 tensor named 'request'")
    try:
        head = json.loads(tensor.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the tensor 'request' is no UTF-8 JSON ({error})") from error
    wanted = {"id", "shape", "prompts", "metadata"}
    if not isinstance(head, dict) or head.keys() != wanted:
        raise ValueError(f"'request' must be an object with exactly the keys {sorted(wanted)}")
    return head


def _images(tensors: dict[str, Tensor], shape: list[int]) -> Tensor:
    if tensors.keys() == {"images"}:
        images = tensors["images"]
        if list(images.shape) != shape:
            raise ValueError(f"images of shape {list(images.shape)}, announced as {shape}")
        return images
    count = shape[0] * (shape[2] if len(shape) == 5 else 1)
    if tensors.keys() != {f"png.{i}" for i in range(count)} or shape[1] != 3:
        raise ValueError(f"expected the tensor 'images', or png.0 to png.{count - 1}; found {sorted(tensors)[:4]}")
    if any(tensor.dtype != torch.uint8 for tensor in tensors.values()):
        raise ValueError("a PNG file must come as a uint8 tensor")
    if not count:
        return torch.zeros(shape)
    files = (tensors[f"png.{i}"].numpy().tobytes() for i in range(count))
    frames = torch.stack([decode_png(file, *shape[-2:]) for file in files])
    return frames if len(shape) == 4 else frames.unflatten(0, (shape[0], shape[2])).transpose(1, 2).contiguous()


def _frames(images: Tensor) -> Tensor:
    """``[N, 3, H, W]`` or ``[N, 3, F, H, W]`` -> ``[N or N F, 3, H, W]``."""
    return images if images.ndim == 4 else images.transpose(1, 2).flatten(0, 1)


def _as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, kind) for item in value)

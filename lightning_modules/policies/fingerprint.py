"""A short name for a set of weights, to recognise them again without reading them all."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

SAMPLES = 1024
"""Elements read of each tensor, evenly spaced; smaller tensors are read whole."""


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> str:
    """32 hexadecimal digits made of every tensor's name, shape, dtype and at most :data:`SAMPLES` of its elements.

    Other weights (another model, another training run, another dtype) give another name, in milliseconds even for a
    backbone of 12 B parameters. It is no checksum: a single flipped bit can pass unseen.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        flat = tensor.reshape(-1)
        some = flat[:: -(-len(flat) // SAMPLES) or 1].contiguous().cpu()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def frozen_fingerprint(module: nn.Module) -> str:
    """Fingerprint of what training leaves alone: parameters that require no gradient, and buffers of the state dict."""
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return fingerprint({name: tensor for name, tensor in module.state_dict().items() if name not in trained})

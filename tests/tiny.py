"""A policy small enough for exhaustive tests: two linear layers, float64 where asked, dropout to catch a wrong mode."""

from __future__ import annotations

import torch
from torch import nn

from lightning_modules.policies.base import Policy
from lightning_modules.types import Conditioning


class TinyPolicy(Policy):
    def __init__(self, channels: int = 3, size: int = 4, hidden: int = 8, seed: int = 0) -> None:
        super().__init__()
        self.shape = (channels, size, size)
        width = channels * size * size
        generator = torch.Generator().manual_seed(seed)
        self.inner = nn.Linear(width + 3, hidden)
        self.dropout = nn.Dropout(0.5)
        self.outer = nn.Linear(hidden, width)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / p.shape[-1] ** 0.5)

    @property
    def latent_shape(self):
        return self.shape

    def encode(self, prompts):
        codes = torch.tensor([[len(p) / 10, sum(map(ord, p)) % 7 / 7] for p in prompts])
        return Conditioning(tensors={"code": codes.to(self.device)})

    def forward(self, latents, sigma, conditioning):
        dtype = self.inner.weight.dtype
        flat = torch.cat([latents.flatten(1), conditioning.tensors["code"], sigma[:, None]], dim=1).to(dtype)
        hidden = self.dropout(torch.tanh(self.inner(flat)))
        return self.outer(hidden).reshape(latents.shape).to(latents.dtype)

    def decode(self, latents):
        return ((latents + 1) / 2).clamp(0, 1).float()

"""Frozen text encoders behind one call: prompts -> named embeddings of a fixed length.

Tokenisation and encoding are those of the family's diffusers pipeline. Every prompt is padded or cut to the same number
of tokens, so that prompts of different lengths can be batched without changing one another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import Tensor, nn

from lightning_modules.policies.fingerprint import fingerprint


class TextEncoder(ABC):
    """Deliberately no ``nn.Module``: neither trained nor checkpointed, and shared by copies of a policy."""

    name: str
    """model, revision and variant it was loaded from."""

    @property
    @abstractmethod
    def modules(self) -> dict[str, nn.Module]:
        """Its networks by name."""

    @abstractmethod
    def __call__(self, prompts: Sequence[str], max_sequence_length: int, device: torch.device) -> dict[str, Tensor]:
        """``[N]`` prompts -> name -> ``[N, ...]`` embeddings, computed on ``device``, where the networks are."""

    def to(self, device: torch.device | str) -> TextEncoder:
        for module in self.modules.values():
            module.to(device)
        return self

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for module in self.modules.values() for p in module.parameters())

    def identity(self) -> str:
        """What an embedding depends on beside its prompt: the name, the dtype and a fingerprint of the weights."""
        weights = {
            f"{part}.{name}": t for part, module in self.modules.items() for name, t in module.state_dict().items()
        }
        return f"{type(self).__name__} {self.name} {self.dtype} {fingerprint(weights)}"

    def __deepcopy__(self, memo: dict) -> TextEncoder:
        return self


class PipelineText(TextEncoder):
    """The text encoders and tokenizers of a diffusers pipeline; whatever else the pipeline holds is not used.

    Args:
        pipeline: of the family's class, possibly without transformer and VAE.
        name: see :attr:`TextEncoder.name`.

    Errors: ``ValueError`` if the pipeline lacks one of the :attr:`components`.
    """

    components: ClassVar[tuple[str, ...]]
    """Names of the encoders and tokenizers in the pipeline."""

    def __init__(self, pipeline: DiffusionPipeline, name: str = "") -> None:
        missing = [part for part in self.components if getattr(pipeline, part, None) is None]
        if missing:
            raise ValueError(f"{type(pipeline).__name__} has no {', '.join(missing)}: load the pipeline with them")
        self.pipeline: Any = pipeline
        self.name = name

    @property
    def modules(self) -> dict[str, nn.Module]:
        parts = {part: getattr(self.pipeline, part) for part in self.components}
        return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}

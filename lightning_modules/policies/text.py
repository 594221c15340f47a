"""Frozen text encoders behind one call: prompts -> named embeddings of a fixed length.

Tokenisation and encoding are those of the family's diffusers pipeline. Every prompt is padded or cut to the same number
of tokens, so that prompts of different lengths can be batched without changing one another.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
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

    Errors: ``ValueError`` if the pipeline lacks one of the :attr:`components`, or has a tokenizer that its encoder cannot
    be used with (:func:`check_tokenizer`).
    """

    components: ClassVar[Mapping[str, str]]
    """Every encoder and tokenizer in the pipeline -> its class in ``transformers``."""

    def __init__(self, pipeline: DiffusionPipeline, name: str = "") -> None:
        missing = [part for part in self.components if getattr(pipeline, part, None) is None]
        if missing:
            raise ValueError(f"{type(pipeline).__name__} has no {', '.join(missing)}: load the pipeline with them")
        for tokenizer, encoder in self.pairs().items():
            check_tokenizer(tokenizer, getattr(pipeline, tokenizer), getattr(pipeline, encoder).config)
        self.pipeline: Any = pipeline
        self.name = name

    @classmethod
    def pairs(cls) -> dict[str, str]:
        """Tokenizer -> the encoder that reads its tokens."""
        tokenizers = [part for part in cls.components if part.startswith("tokenizer")]
        return {tokenizer: tokenizer.replace("tokenizer", "text_encoder") for tokenizer in tokenizers}

    @property
    def modules(self) -> dict[str, nn.Module]:
        parts = {part: getattr(self.pipeline, part) for part in self.components}
        return {name: part for name, part in parts.items() if isinstance(part, nn.Module)}

    def identity(self) -> str:
        """As above, and the tokenizers' vocabularies."""
        words = [sorted(getattr(self.pipeline, tokenizer).get_vocab().items()) for tokenizer in self.pairs()]
        return f"{super().identity()} {hashlib.blake2b(json.dumps(words).encode(), digest_size=16).hexdigest()}"


def check_tokenizer(name: str, tokenizer: Any, encoder: Any) -> None:
    """Whether ``tokenizer`` can serve an encoder with the configuration ``encoder``.

    A tokenizer whose files are missing is no error to its library: it knows only special tokens, and every prompt becomes
    a row of unknowns. A released vocabulary fills the encoder's table but for a few rows of padding (T5: 32,100 of 32,128),
    so less than nine tenths of it is taken for such a one, or for another model's; more than all of it, and more tokens than
    CLIP has positions, fail at the first prompt.

    Errors: ``ValueError`` naming the tokenizer and the remedy.
    """
    tokens, rows = len(tokenizer), encoder.vocab_size
    if not 0.9 * rows <= tokens <= rows:
        files = ", ".join(tokenizer.vocab_files_names.values())
        raise ValueError(
            f"{name} knows {tokens:,} tokens and its text encoder {rows:,}: it lacks its files ({files}) or is another "
            "model's; give the complete folder that was released with the encoder"
        )
    positions = getattr(encoder, "max_position_embeddings", None)
    if positions is not None and tokenizer.model_max_length > positions:
        raise ValueError(
            f"{name} makes up to {tokenizer.model_max_length:,} tokens of a prompt and its text encoder takes {positions}: "
            "its tokenizer_config.json is missing or another model's; give the one that was released with the encoder"
        )

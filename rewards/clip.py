"""CLIP of ``transformers`` as several rewards use it: features that are plain fp32 tensors, prompts cut at the model's
length, and images resized by PIL in 8 bits (the preprocessing that CLIP, PickScore and LAION's aesthetic heads were trained
and published with; ``transformers``' default resizes tensors, which differs in the last bits).

Imports ``transformers``: import this module where networks are read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import CLIPImageProcessorPil, CLIPModel, CLIPProcessor, CLIPTokenizer

from rewards.files import download_command, find_folder, first_line
from rewards.images import as_pil

MODEL_FILES = ("config.json", "model.safetensors")
PROCESSOR_FILES = ("*.json", "*.txt")


class CLIPFeatures(CLIPModel):
    """A CLIPModel whose features are tensors ``[N, P]`` in fp32, P = ``projection_dim``. ``transformers`` 5 returns an
    object that carries them as ``pooler_output``."""

    def get_image_features(self, *args: Any, **options: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._features(super().get_image_features(*args, **options))

    def get_text_features(self, *args: Any, **options: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._features(super().get_text_features(*args, **options))

    def _features(self, output: Any) -> Tensor:
        features = output.pooler_output
        assert features.ndim == 2 and features.shape[1] == self.config.projection_dim, features.shape
        return features.float()


@dataclass(frozen=True, kw_only=True)
class LoadedCLIP:
    """A network and what prepares its inputs."""

    network: CLIPFeatures
    """fp32, on the CPU."""
    processor: Callable[..., Any]
    """``images=[PIL or uint8 tensors [3, H, W]]`` -> ``pixel_values [N, 3, S, S]``; ``text=[...]`` -> ``input_ids`` and
    ``attention_mask [N, T]``. Further arguments as of ``CLIPProcessor``; prompts are cut so that their end token stays."""
    weights: Path
    """the file that the network was read from."""
    logit_scale: float
    """factor on the cosine, exp of the trained parameter: 100 for OpenAI's models."""


def load_clip(model: str, processor: str, *, what: str) -> LoadedCLIP:
    """Read a CLIP.

    Args:
        model: local folder or hub id of the network, ``config.json`` and ``model.safetensors`` (locally
            ``pytorch_model.bin`` will do).
        processor: local folder or hub id of the tokenizer and the image processor.
        what: names the reward in messages.

    Errors: ``ValueError`` naming the folder and the command on missing, truncated or incomplete files, and on a processor
    that does not go with the network.
    """
    network, weights = _load_network(model, what=f"{what} model")
    folder = find_folder(processor, PROCESSOR_FILES, what=f"{what} processor")
    images, tokenizer = _load_processor(
        folder, what=f"{what} processor", get=download_command(processor, PROCESSOR_FILES)
    )
    config: Any = network.config
    text, vision = config.text_config, config.vision_config
    if len(tokenizer) > text.vocab_size or images.crop_size["height"] != vision.image_size:
        raise ValueError(
            f"{what}: the processor in {folder} has {len(tokenizer)} tokens and crops to {images.crop_size['height']} pixels, "
            f"the network in {weights.parent} knows {text.vocab_size} tokens and reads {vision.image_size} pixels; give the "
            "processor of the same CLIP"
        )
    both: Any = CLIPProcessor(image_processor=images, tokenizer=tokenizer)
    return LoadedCLIP(
        network=network,
        processor=partial(both, truncation=True, max_length=text.max_position_embeddings),
        weights=weights,
        logit_scale=network.logit_scale.exp().item(),
    )


def image_features(network: CLIPFeatures, processor: Callable[..., Any], images: Tensor) -> Tensor:
    """``images [N, 3, H, W]`` float in [0, 1] -> ``[N, P]`` fp32, not normalised."""
    pixels = processor(images=as_pil(images), return_tensors="pt")["pixel_values"]
    return network.get_image_features(pixel_values=pixels.to(network.device))


def text_features(network: CLIPFeatures, processor: Callable[..., Any], prompts: Sequence[str]) -> Tensor:
    """N prompts -> ``[N, P]`` fp32, not normalised."""
    tokens = processor(text=list(prompts), padding=True, return_tensors="pt").to(network.device)
    return network.get_text_features(input_ids=tokens["input_ids"], attention_mask=tokens["attention_mask"])


def _load_network(source: str, *, what: str) -> tuple[CLIPFeatures, Path]:
    folder = find_folder(source, MODEL_FILES, what=what)
    get = download_command(source, MODEL_FILES)
    weights = next(
        (folder / name for name in ("model.safetensors", "pytorch_model.bin") if (folder / name).is_file()), None
    )
    if weights is None or not (folder / "config.json").is_file():
        raise ValueError(f"{what}: no {' and '.join(MODEL_FILES)} in {folder}; run `{get}` or give another folder")
    try:
        loaded: Any = CLIPFeatures.from_pretrained(
            folder, local_files_only=True, weights_only=True, dtype="float32", output_loading_info=True
        )
    except Exception as error:  # safetensors, pickle and transformers raise classes of their own
        raise ValueError(f"{what}: cannot read {weights} ({first_line(error)}); get it again: `{get}`") from error
    network, report = loaded
    if missing := report["missing_keys"]:
        raise ValueError(f"{what}: {weights} lacks {len(missing)} tensors such as {min(missing)}; it is no whole CLIP")
    return network, weights


def _load_processor(folder: Path, *, what: str, get: str) -> tuple[CLIPImageProcessorPil, CLIPTokenizer]:
    if not any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json")):  # made empty by transformers
        raise ValueError(f"{what}: no tokenizer.json or vocab.json in {folder}; run `{get}` or give another folder")
    try:
        return CLIPImageProcessorPil.from_pretrained(folder), CLIPTokenizer.from_pretrained(folder)
    except Exception as error:  # OSError, ValueError, JSON's and tokenizers' own classes
        raise ValueError(f"{what}: cannot read {folder} ({first_line(error)}); run `{get}`") from error

"""Does the image show the text that the prompt asks for? Optical character recognition against a target string.

With ``t`` the target, ``r`` everything read in the image, both normalised, and ``n`` the length of ``t``::

    score = 1                                    where t is a substring of r
            1 - min(levenshtein(r, t), n) / n    otherwise

so scores lie in [0, 1]. The formula is that of Flow-GRPO (Liu et al. 2025, arXiv:2505.05470). The engine is another one:
RapidOCR with the models that its wheel ships (detection, text direction, recognition; Chinese, Japanese and the languages
of Latin letters) in place of PaddleOCR, so results are named ``ocr_rapid``. Every line read counts, however unsure the
engine is of it.

Normalised text is compared in lower case and without spaces (:func:`normalise`), in any script. The target is the
metadata entry ``target_key`` where a prompt has one, else the first quoted span of the prompt (:func:`quoted`). A video
scores the mean over every fourth frame.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rewards.base import Reward
from rewards.files import checksum
from rewards.video import mean_over_frames

FRAME_STEP = 4
"""Of a video, frames 0, 4, 8, ... are read."""

# Opening mark -> the marks that close it.
_QUOTES = {'"': '"', "“": "”", "„": "“”", "”": "”", "«": "»", "»": "«", "「": "」", "『": "』", "＂": "＂"}
_SPAN = re.compile("|".join(f"{first}([^{first}{last}]*)[{last}]" for first, last in _QUOTES.items()))
# Single marks double as apostrophes: they quote only where they stand at the edges of words.
_SINGLE_SPAN = re.compile(r"‘(.+?)’(?!\w)|‚(.+?)[‘’](?!\w)|‹(.+?)›|(?<!\w)'(.+?)'(?!\w)")
_PLAIN = str.maketrans(
    {**dict.fromkeys("‘’‚‛′´`", "'"), **dict.fromkeys("“”„‟″", '"'), **dict.fromkeys("‐‑‒–—―−", "-")}
)


class OCR(Reward):
    """Scores in [0, 1]; 1 where the target was read in full.

    Args:
        target_key: metadata key of the target text; prompts without it are searched for a quoted span.
        threads: processor threads of the engine, which runs on the CPU wherever the images are; ``None``: all cores.
            Give each of several processes of one machine its share.

    Errors: ``ValueError`` on scoring a prompt without a target; on loading, if the engine or its models are missing.
    """

    reads = "text"

    def __init__(self, *, target_key: str = "text", threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise ValueError(f"threads={threads}: give at least 1, or null for all cores")
        self.target_key = target_key
        self.threads = threads
        self._engine: Any = None

    def load(self) -> None:
        if self._engine is None:
            self._engine = _build_engine(self.threads)

    def identity(self) -> dict[str, Any]:
        return {
            **super().identity(),
            "name": "ocr_rapid",
            "rapidocr": version("rapidocr"),
            "onnxruntime": version("onnxruntime"),
            "models": {file.name: checksum(file) for file in _models()},
            "target_key": self.target_key,
        }

    def score(self, images: Tensor, prompts: Sequence[str], metadata: Sequence[dict[str, Any]]) -> Tensor:
        """``images [N, 3, H, W]`` or ``[N, 3, F, H, W]``, float in [0, 1] -> scores [N] in [0, 1], on the CPU."""
        targets = [
            find_target(prompt, row, self.target_key) for prompt, row in zip(prompts, metadata, strict=True)
        ]  # before any reading

        def score_images(still: Tensor) -> Tensor:
            texts = self.read(still)
            return torch.tensor([similarity(read, t) for read, t in zip(texts, targets, strict=True)]).double()

        if images.ndim == 5:
            return mean_over_frames(score_images, images, range(0, images.shape[2], FRAME_STEP))
        return score_images(images)

    def read(self, images: Tensor) -> list[str]:
        """The text in each of ``images [N, 3, H, W]`` (float in [0, 1]): its lines from top to bottom, joined by spaces."""
        self.load()
        pixels = (images.detach().float().cpu() * 255).round().byte().permute(0, 2, 3, 1).numpy()
        bgr = np.ascontiguousarray(pixels[..., ::-1])  # the order of channels that the engine takes arrays in
        return [" ".join(self._engine(image).txts or ()) for image in bgr]


def find_target(prompt: str, metadata: Mapping[str, Any], key: str) -> str:
    """The text that ``prompt`` asks for. Errors: ``ValueError`` if neither the metadata nor the prompt names one."""
    target = metadata[key] if key in metadata else quoted(prompt)
    if target is None:
        raise ValueError(
            f"prompt {prompt!r} quotes no text and its metadata has no {key!r} (keys: {sorted(metadata)}): quote the text "
            "to be drawn, add it to the metadata, or keep this reward to prompts that ask for text"
        )
    if not isinstance(target, str) or not normalise(target):
        raise ValueError(f"prompt {prompt!r} asks for the text {target!r}: expected a string with visible characters")
    return target


def quoted(prompt: str) -> str | None:
    """The first span between double quotation marks, straight or typographic, of any of the usual styles; without one,
    the first between single marks. ``None`` if nothing visible is quoted."""
    for pattern in (_SPAN, _SINGLE_SPAN):
        for match in pattern.finditer(prompt):
            span = next(group for group in match.groups() if group is not None)
            if normalise(span):
                return span
    return None


def similarity(read: str, target: str) -> float:
    """The module's formula, in [0, 1]; ``target`` must hold a visible character."""
    from rapidfuzz.distance import Levenshtein

    found, wanted = normalise(read), normalise(target)
    assert wanted
    distance = 0 if wanted in found else min(Levenshtein.distance(found, wanted), len(wanted))
    return 1.0 - distance / len(wanted)


def normalise(text: str) -> str:
    """Text as it is compared: Unicode's compatibility form NFKC, case folded, typographic quotes and dashes made plain,
    without spaces and invisible format characters."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text.translate(_PLAIN)).casefold())
    return "".join(c for c in text if not c.isspace() and unicodedata.category(c) not in ("Cf", "Cc"))


def _models() -> list[Path]:
    """The model files inside the installed package."""
    import rapidocr

    return sorted(Path(rapidocr.__file__).parent.joinpath("models").glob("*.onnx"))


def _build_engine(threads: int | None) -> Any:
    """The engine with every model read; nothing is fetched."""
    remedy = "run `pip install --force-reinstall rapidocr onnxruntime`"
    try:
        from rapidocr import RapidOCR

        if not _models():
            raise FileNotFoundError("the package holds no models")
        engine: Any = RapidOCR(
            params={
                "Global.log_level": "error",
                "Global.text_score": 0.0,
                "EngineConfig.onnxruntime.intra_op_num_threads": threads or -1,
            }
        )
        read = engine(_sample()).txts  # the models are read at first use
    except Exception as error:
        raise ValueError(f"the OCR engine does not start ({type(error).__name__}: {error}); {remedy}") from error
    if read is None or similarity(" ".join(read), "READY 123") < 1:
        raise ValueError(f"the OCR engine misreads its sample: {read} in place of 'READY 123'; {remedy}")
    return engine


def _sample() -> np.ndarray:
    """Black letters on white, uint8 ``[64, 256, 3]``."""
    from PIL import Image, ImageDraw, ImageFont

    canvas = Image.new("RGB", (256, 64), "white")
    ImageDraw.Draw(canvas).text((128, 32), "READY 123", font=ImageFont.load_default(32), fill="black", anchor="mm")
    return np.asarray(canvas)

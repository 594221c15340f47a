"""An architecture of open_clip, untrained, with its tokenizer: for checkpoints that are read apart from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import nn


def make_network(architecture: str) -> tuple[nn.Module, Any]:
    """``architecture``: open_clip's name, or the path of a JSON file in open_clip's format -> a ``CLIP`` and its tokenizer,
    whose vocabulary open_clip ships. Errors: ``ValueError`` if it is neither."""
    import open_clip

    config = open_clip.get_model_config(architecture)
    if config is None:
        file = Path(architecture).expanduser()
        if not file.is_file():
            raise ValueError(
                f"architecture={architecture!r}: neither a model of open_clip, such as ViT-L-14, nor a file"
            )
        config = json.loads(file.read_text(encoding="utf-8"))
    return open_clip.CLIP(**config), open_clip.SimpleTokenizer(context_length=config["text_cfg"]["context_length"])

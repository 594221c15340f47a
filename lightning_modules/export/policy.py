"""What was trained, written so that diffusers opens it: adapters for ``pipe.load_lora_weights(folder)``, full weights for
``<transformer's class>.from_pretrained(folder)``.

After writing, the files are read back by diffusers' own loader and have to give the velocities that were trained; only
then does the folder get its name.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

from diffusers.models.modeling_utils import ModelMixin
from torch.distributed.fsdp import FSDPModule

from lightning_modules.export.adapters import check_adapters, write_adapters
from lightning_modules.export.full import check_full, write_full
from lightning_modules.policies.base import Policy
from lightning_modules.policies.lora import adapter_layers


def export_policy(policy: Policy, folder: str | Path) -> Path:
    """Write the adapters of ``policy``, or without any its whole transformer, to a new ``folder``; check it; return it.

    The policy is left as it is, bit for bit. Errors: ``ValueError`` if ``folder`` exists or diffusers has no format for
    the policy; ``RuntimeError`` if the check fails. There is no folder then.
    """
    folder, backbone = Path(folder), backbone_of(policy)
    if folder.exists():
        raise ValueError(f"{folder} exists: export to a new folder")
    write, check = (write_adapters, check_adapters) if adapter_layers(backbone) else (write_full, check_full)
    draft = folder.with_name(f".{folder.name}.{os.getpid()}")
    was_training = backbone.training
    try:
        draft.mkdir(parents=True)
        write(backbone.transformer, draft)
        check(backbone.eval(), draft)
        os.replace(draft, folder)
    finally:
        backbone.train(was_training)
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def how_to_open(policy: Policy, folder: Path) -> str:
    """The line of Python that opens an export."""
    backbone = backbone_of(policy)
    if adapter_layers(backbone):
        return f"pipe.load_lora_weights({json.dumps(str(folder))})"
    name = next(kind.__name__ for kind in type(backbone.transformer).__mro__ if not issubclass(kind, FSDPModule))
    return f"transformer = {name}.from_pretrained({json.dumps(str(folder))})"


def backbone_of(policy: Policy) -> Any:
    """The policy that holds the transformer: ``policy`` itself, or the one it wraps."""
    for module in policy.modules():
        if isinstance(module, Policy) and isinstance(getattr(module, "transformer", None), ModelMixin):
            return module
    raise ValueError(f"{type(policy).__name__} holds no diffusers transformer to export")

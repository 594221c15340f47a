"""Pretrained components from a diffusers repository: a hub id or a local folder. Whatever can be wrong is looked for in
the configuration files first; weights are read last."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn

if TYPE_CHECKING:
    from lightning_modules.policies.diffusers_base import DiffusersPolicy
    from lightning_modules.policies.text import TextEncoder

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a policy is made of."""

    transformer: nn.Module
    """in the dtype asked for."""
    text: TextEncoder
    """in the dtype asked for."""
    vae: nn.Module
    """in fp32: in half precision some VAEs overflow."""


def load_parts(
    family: type[DiffusersPolicy],
    path: str,
    *,
    variant: str | None,
    revision: str | None,
    dtype: str,
    **options: Any,
) -> Parts:
    """Load the components of ``family`` from ``path`` for a policy with ``options``.

    Errors: ``ValueError`` naming the value and the remedy, before weights are read, on an unknown dtype, a repository of
    another pipeline or without a component, and on whatever the policy itself refuses.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    _check_index(family, path, revision)

    def draft(kind: type[Any], component: str) -> nn.Module:
        with torch.device("meta"):
            return kind.from_config(_config(kind, path, component, revision))

    family(
        transformer=draft(family.transformer_class, "transformer"),
        vae=draft(family.vae_class, "vae"),
        text=None,
        **options,
    )
    where = {"revision": revision, "variant": variant}
    text = _readable(
        lambda: family.pipeline_class.from_pretrained(
            path, transformer=None, vae=None, scheduler=None, dtype=DTYPES[dtype], **where
        ),
        path,
        "text encoders",
    )
    return Parts(
        transformer=_weights(family.transformer_class, path, "transformer", dtype=DTYPES[dtype], **where),
        vae=_weights(family.vae_class, path, "vae", dtype=torch.float32, **where),
        text=family.text_class(text, name=f"{path} {revision} {variant}"),
    )


def _check_index(family: type[DiffusersPolicy], path: str, revision: str | None) -> None:
    index = _readable(lambda: DiffusionPipeline.load_config(path, revision=revision), path, "model_index.json")
    kind, wanted = index.get("_class_name"), family.pipeline_class.__name__
    if kind != wanted:
        raise ValueError(f"{path} holds a {kind}, {family.__name__} needs a {wanted}: choose the policy of its family")
    family.check_index(path, index)
    for name in ("transformer", "vae", *family.text_class.components):
        if not index.get(name) or index[name][1] is None:
            raise ValueError(f"{path} has no {name} in its model_index.json: give a complete {wanted} repository")
        if Path(path).is_dir() and not (Path(path) / name).is_dir():
            raise ValueError(f"{path} has no folder {name}: give a complete {wanted} repository")
    for name, expected in (("transformer", family.transformer_class), ("vae", family.vae_class)):
        if index[name][1] != expected.__name__:
            raise ValueError(
                f"the {name} of {path} is a {index[name][1]}, {family.__name__} needs a {expected.__name__}: give a "
                "repository of that family"
            )


def _config(kind: type[Any], path: str, component: str, revision: str | None) -> Mapping[str, Any]:
    config = _readable(
        lambda: kind.load_config(path, subfolder=component, revision=revision), path, f"{component}/config.json"
    )
    if config.get("_class_name") != kind.__name__:
        raise ValueError(
            f"{path}/{component}/config.json is of a {config.get('_class_name')}, expected a {kind.__name__}: the folder "
            "holds another model's files"
        )
    return config


def _weights(kind: type[Any], path: str, component: str, **options: Any) -> nn.Module:
    return _readable(
        lambda: kind.from_pretrained(path, subfolder=component, **options), path, f"weights of {component}"
    )


def _readable(read: Callable[[], Any], path: str, what: str) -> Any:
    try:
        return read()
    except (OSError, ValueError) as error:  # the libraries' words for a missing file, repository, variant or revision
        raise ValueError(
            f"no {what} in {path} ({error}): give a local folder or a hub id, its variant and revision; without network "
            "only what the hub's cache holds can be loaded"
        ) from error

"""Pretrained components from a diffusers repository: a hub id or a local folder. Whatever can be wrong is looked for in
the configuration files first; weights are read last."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline
from torch import nn

from lightning_modules.policies.text import PipelineText, TextEncoder, check_tokenizer

if TYPE_CHECKING:
    from lightning_modules.policies.diffusers_base import DiffusersPolicy

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
    """Load the components of ``family`` from ``path`` for a policy with ``options``. Every network has to have ``variant``.

    Errors: ``ValueError`` naming the value and the remedy: before weights are read, on an unknown dtype, a repository of
    another pipeline, without a component or with one of another class, unusable tokenizers, and whatever the policy itself
    refuses; then on weights that are damaged or incomplete.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r}: choose one of {', '.join(DTYPES)}")
    _check_index(family, path, revision)

    def draft(kind: type[Any], component: str) -> nn.Module:
        config = _config(kind, path, component, revision)
        with torch.device("meta"):
            return _readable(lambda: kind.from_config(config), path, f"{component}/config.json")

    family(
        transformer=draft(family.transformer_class, "transformer"),
        vae=draft(family.vae_class, "vae"),
        text=None,
        **options,
    )
    tokenizers = _tokenizers(family.text_class, path, revision)
    where = {"revision": revision, "variant": variant}
    encoders = {
        name: _weights(_transformers(family.text_class, name), path, name, dtype=DTYPES[dtype], **where)
        for name in family.text_class.pairs().values()
    }
    pipeline: Any = family.pipeline_class
    text = pipeline(**tokenizers, **encoders, transformer=None, vae=None, scheduler=None)
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
    classes = {"transformer": family.transformer_class.__name__, "vae": family.vae_class.__name__}
    for name, expected in (classes | dict(family.text_class.components)).items():
        given = _class_in(index, name)
        if given is None:
            raise ValueError(f"{path} has no {name} in its model_index.json: give a complete {wanted} repository")
        if Path(path).is_dir() and not (Path(path) / name).is_dir():
            raise ValueError(f"{path} has no folder {name}: give a complete {wanted} repository")
        if given.removesuffix("Fast") != expected:  # two names of one tokenizer
            raise ValueError(
                f"the {name} of {path} is a {given}, {family.__name__} needs a {expected}: give a repository of that family"
            )


def _class_in(index: Mapping[str, Any], component: str) -> str | None:
    """The component's class in a ``model_index.json``, where it is ``[library, class]``; ``None`` if there is none."""
    match index.get(component):
        case [_, str(name)]:
            return name
    return None


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


def _tokenizers(text: type[PipelineText], path: str, revision: str | None) -> dict[str, Any]:
    """Every tokenizer, checked against the configuration of its encoder."""
    made = {}
    for name, encoder in text.pairs().items():
        kind = _transformers(text, name)
        where = {"subfolder": name, "revision": revision}
        made[name] = _readable(
            lambda kind=kind, where=where: kind.from_pretrained(path, **where), path, f"files of {name}"
        )
        check_tokenizer(
            f"{path}/{name}", made[name], _text_config(_transformers(text, encoder), path, encoder, revision)
        )
    return made


def _text_config(kind: type[Any], path: str, component: str, revision: str | None) -> Any:
    """An encoder's configuration, which may be one part of that of the model it was cut out of."""
    config, what = kind.config_class, f"{component}/config.json"
    where = {"subfolder": component, "revision": revision}
    values, _ = _readable(lambda: config.get_config_dict(path, **where), path, what)
    if values.get("model_type") != config.model_type and config.base_config_key not in values:
        raise ValueError(
            f"{path}/{what} is of a {values.get('model_type')} model, expected {config.model_type}: the file is missing, or "
            "the folder holds another model's"
        )
    return _readable(lambda: config.from_pretrained(path, **where), path, what)


def _transformers(text: type[PipelineText], component: str) -> type[Any]:
    import transformers

    return getattr(transformers, text.components[component])


def _weights(kind: type[Any], path: str, component: str, **options: Any) -> nn.Module:
    """Errors: ``ValueError`` also on tensors that the files lack, which the libraries would make up or leave out."""
    model, report = _readable(
        lambda: kind.from_pretrained(path, subfolder=component, output_loading_info=True, **options),
        path,
        f"weights of {component}",
    )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"the weights of {component} in {path} lack {len(missing)} tensors, first {missing[0]}: its files are incomplete "
            "or another model's; fetch that folder again"
        )
    return model


def _readable(read: Callable[[], Any], path: str, what: str) -> Any:
    try:
        return read()
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # each library has its own words for files that are missing, damaged or of another model
        reason = textwrap.shorten(f"{type(error).__name__}: {error}", 300)
        raise ValueError(
            f"no {what} in {path} that can be read ({reason}): give a local folder or a hub id, its variant and revision, "
            "and fetch damaged files again; without network only what the hub's cache holds can be loaded"
        ) from error

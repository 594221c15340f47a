"""What a run of an experiment's config would do and hold, before anything is downloaded:

    python -m benchmarks.plan configs/experiment/flux_dev/leangrpo.yaml [--device cuda]

The policy is the released architecture named like the config's folder, without weights; everything else is the config's.
Text encoders are left out. ``fit`` prints the same plan when it starts, if ``callbacks.plan_report.PlanReport`` is
among its callbacks.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningDataModule, LightningModule

from benchmarks.random_weights import untrained
from lightning_modules.plan.plan import Plan, readable

LOADER = ".from_pretrained"
OF_FILES = ("path", "variant", "revision", "dtype")
"""Arguments of the loader that are not the policy's own."""


def read_config(file: str | Path) -> tuple[ArgumentParser, Namespace]:
    """A config with the files it is composed of, but for the trainer's callbacks; its parser makes ``model`` and ``data``."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--seed_everything", type=int)
    parser.add_argument("--trainer", type=dict)
    parser.add_subclass_arguments(LightningModule, "model")
    parser.add_subclass_arguments(LightningDataModule, "data")
    return parser, parser.parse_path(str(file))


def plan_config(file: str | Path, device: str = "cpu") -> Plan:
    """Plan the run of a config. Errors: ``ValueError`` if its policy is no pretrained one of a released architecture."""
    parser, config = read_config(file)
    _without_weights(config.model.init_args, "policy", Path(file).parent.name)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # renamed in jsonargparse 4.49
    objects: Any = instantiate(config)
    model = objects.model
    precision = config.trainer.get("precision")
    if precision == "bf16-true":
        model.to(torch.bfloat16)
    return model.plan(
        ["a prompt"] * objects.data.prompts_per_step, device=device, autocast=_autocast(precision, device)
    )


def summary(plan: Plan) -> str:
    """One line for a config's header."""
    parts = ", ".join(f"{name} {readable(size)}" for name, size, _ in plan.memory() if size)
    steps = f"{readable(plan.activation_bytes_per_step)} per row and step"
    reference = f" + {plan.reference_rows:,} of the reference" if plan.reference_rows else ""
    return (
        f"{readable(plan.total_bytes)} = {parts} ({plan.retained_row_steps} x {steps}); "
        f"{plan.forward_rows:,} policy rows{reference} and {plan.samples:,} samples per iteration."
    )


def _without_weights(arguments: Namespace, name: str, model: str) -> None:
    """Put the released architecture in place of the pretrained policy, inside any guidance that wraps it."""
    node = arguments[name]
    if "policy" in node.init_args:
        return _without_weights(node.init_args, "policy", model)
    if not node.class_path.endswith(LOADER):
        raise ValueError(f"{node.class_path} is no pretrained policy: give a config with a policy's {LOADER}")
    given = node.init_args.as_dict()
    options = {key: value for key, value in given.items() if key not in OF_FILES}
    arguments[name] = Namespace(
        class_path=f"{untrained.__module__}.{untrained.__name__}",
        init_args=Namespace(
            model=model,
            dtype=given["dtype"],
            device="meta",
            smaller=None,
            smaller_vae=None,
            options=options | {"embedding_cache": None, "text_device": "cpu"},
        ),
    )


def _autocast(precision: str | None, device: str) -> Callable[[], AbstractContextManager[Any]]:
    if precision != "bf16-mixed":
        return nullcontext
    return lambda: torch.autocast(torch.device(device).type, torch.bfloat16)


def main(args: Sequence[str] | None = None) -> Plan:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.plan", description="Plan the run of a config without its model's weights."
    )
    parser.add_argument("config", help="a file in configs/experiment")
    parser.add_argument("--device", default="cpu", help="whose kernels are assumed; it need not be here (default: cpu)")
    parser.add_argument("--line", action="store_true", help="only the line for the config's header")
    options = parser.parse_args(args)
    plan = plan_config(options.config, options.device)
    print(summary(plan) if options.line else plan)
    return plan


if __name__ == "__main__":
    main()

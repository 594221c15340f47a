"""Export a run's checkpoint to what diffusers opens (see ``export.policy``).

``python -m lightning_modules.export --config runs/version_0/config.yaml --folder my_adapter``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
import yaml
from jsonargparse import ArgumentParser

from lightning_modules.export.policy import export_policy, how_to_open
from lightning_modules.parallel.checkpoints import read_shards
from lightning_modules.policies.base import Policy
from lightning_modules.policies.fingerprint import frozen_fingerprint
from lightning_modules.state import check_checkpoint


def load_policy(config: Path) -> Policy:
    """The policy that a run's ``config.yaml`` describes, untrained. Errors: ``ValueError`` if it describes none."""
    try:
        described = yaml.safe_load(config.read_text(encoding="utf-8"))["model"]["init_args"]["policy"]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ValueError(f"{config} is no config of a run ({error!r}): give the one in a run's folder") from None
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--policy", type=Policy)
    return parser.instantiate_classes(parser.parse_object({"policy": described}))["policy"]


def load_weights(policy: Policy, checkpoint: Path, *, raw: bool = False) -> str:
    """Put a checkpoint's weights into ``policy`` and say which: the average if the run kept one, unless ``raw``.

    Errors: ``ValueError`` on a file that is no checkpoint of this policy.
    """
    try:
        folder = checkpoint.is_dir()  # sharded by FSDP2
        content = read_shards(checkpoint) if folder else torch.load(checkpoint, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{checkpoint} is no readable checkpoint ({error}): give one of a run's checkpoints/"
        ) from None
    check_checkpoint(content, policy, frozen_fingerprint(policy), checkpoint)
    average = content["callbacks"].get("EMA", {}).get("weights")
    weights, which = (content["state_dict"], "trained") if raw or average is None else (average, "averaged")
    policy.load_state_dict({name.removeprefix("policy."): tensor for name, tensor in weights.items()}, strict=False)
    return f"{which} weights after iteration {content['lean_grpo']['iteration']}"


def main(args: Sequence[str] | None = None) -> Path:
    """The command; returns the folder it wrote. Errors: as :func:`export_policy` and the loaders above."""
    parser = argparse.ArgumentParser(
        prog="python -m lightning_modules.export", description="Export a run's checkpoint to what diffusers opens."
    )
    parser.add_argument("--config", required=True, type=Path, help="config.yaml in the run's folder")
    parser.add_argument("--folder", required=True, type=Path, help="where to write; must not exist")
    parser.add_argument("--ckpt_path", type=Path, help="default: checkpoints/last.ckpt beside the config")
    parser.add_argument("--raw", action="store_true", help="the trained weights even where the run kept an average")
    parser.add_argument("--device", default="cpu", help="where the export is checked; default: %(default)s")
    options = parser.parse_args(args)
    policy = load_policy(options.config)
    checkpoint = options.ckpt_path or options.config.parent / "checkpoints" / "last.ckpt"
    which = load_weights(policy, checkpoint, raw=options.raw)
    folder = export_policy(policy.to(options.device), options.folder)
    print(f"{which}, written to {folder}; open it with\n  {how_to_open(policy, folder)}", flush=True)
    return folder


if __name__ == "__main__":
    main()

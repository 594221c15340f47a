"""The command line: ``python train.py {fit,validate,test,predict} --config FILE [--key value ...]``.

Values on the command line beat those of files wherever they stand; of several files the later beats the earlier. What a
run writes lies in a folder of its own, ``<trainer.default_root_dir>/version_<n>``, together with the resolved config.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonargparse
import yaml
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import ArgsType, LightningArgumentParser, LightningCLI

from callbacks.checkpoint_io import AtomicCheckpointIO, check_is_checkpoint
from callbacks.run_folder import RunFolder
from lightning_modules.strategies import check_strategy

WHOLE_RUN = "set trainer.max_epochs: 1 and the number of rollouts by data.init_args.iterations"
REFUSED = {
    "gradient_clip_val": (None, "the module clips its own gradient: set model.init_args.max_grad_norm"),
    "accumulate_grad_batches": (1, "an iteration is one update: set data.init_args.prompts_per_step and "
                                   "model.init_args.generations_per_prompt"),
    "max_steps": (-1, f"it would count optimizer steps: {WHOLE_RUN}"),
}  # fmt: skip
"""Trainer argument -> (its neutral value, what to set instead) where the module steps its own optimizer."""


_read_yaml = jsonargparse.get_loader("yaml")


def read_value(text: str) -> Any:
    """YAML, where a lone ``None`` is null too: jsonargparse hands an option that lies two classes deep down as Python
    writes it, so that ``--model.init_args.advantage.init_args.clip null`` arrives as ``None``."""
    value = _read_yaml(text)
    return None if value == "None" else value


jsonargparse.set_loader("yaml", read_value, exceptions=(yaml.YAMLError,))


class TrainingCLI(LightningCLI):
    """Lightning's command line with files before flags, one folder a run, and checkpoints that are whole or absent."""

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        return super().init_parser(allow_abbrev=False, **kwargs)  # an abbreviation is an unknown option, not a guess

    def parse_arguments(self, parser: LightningArgumentParser, args: ArgsType) -> None:
        assert args is None or isinstance(args, list)
        self.config = parser.parse_args(files_first(sys.argv[1:] if args is None else args))

    def _parse_ckpt_path(self) -> None:
        """Only look whether the file is there: checkpoints hold no hyperparameters that could override the config."""
        path = self.config[self.config.subcommand].ckpt_path
        if path is not None:
            check_is_checkpoint(path)

    def instantiate_classes(self) -> None:
        """What refuses a value has the last word, not jsonargparse, which would repeat the whole config after it."""
        try:
            super().instantiate_classes()
            return
        except ValueError as error:
            refusal: BaseException = error
        while str(refusal).startswith("Does not validate against any of the Union subtypes") and refusal.__cause__:
            refusal = refusal.__cause__
        raise refusal

    def _instantiate_trainer(self, config: dict[str, Any], callbacks: list[Callback]) -> Trainer:
        owns_update = not self.model.automatic_optimization
        if owns_update:
            for name, (neutral, remedy) in REFUSED.items():
                if config[name] not in (None, neutral):
                    raise ValueError(f"trainer.{name}={config[name]}: {remedy}")
        root = Path(config["default_root_dir"] or ".")  # null is the working directory to Lightning
        default_loggers = config["logger"] in (None, True)
        plugins = config["plugins"] or []
        plugins = list(plugins) if isinstance(plugins, (list, tuple)) else [plugins]
        if not any(isinstance(plugin, CheckpointIO) for plugin in plugins):
            plugins.append(AtomicCheckpointIO())
        changed = {"plugins": plugins, "logger": False if default_loggers else config["logger"]}
        trainer = super()._instantiate_trainer(config | changed, callbacks)
        if owns_update:
            check_strategy(trainer.strategy)  # before any process is started
        trainer.callbacks.insert(0, RunFolder(root, loggers=default_loggers))  # pyright: ignore[reportAttributeAccessIssue]
        return trainer


def files_first(args: Sequence[str]) -> list[str]:
    """Move ``--config`` and the files or classes of whole groups (``--model``, ``--data``, ``--trainer``) in front of the
    options that set single values, so that the order typed does not decide which wins."""
    options: list[list[str]] = [[]]
    for arg in args:
        if re.match(r"--?[A-Za-z]", arg):
            options.append([])
        options[-1].append(arg)
    command, *rest = options
    return [*command, *itertools.chain.from_iterable(sorted(rest, key=_rank))]


def _rank(option: list[str]) -> int:
    name = option[0].partition("=")[0]
    return 0 if re.fullmatch(r"-c.*|--config", name) else 1 if name in ("--model", "--data", "--trainer") else 2


def main(args: Sequence[str] | None = None) -> LightningCLI:
    """Run a command line (``sys.argv`` by default); returns the finished CLI with its trainer, model and datamodule."""
    return TrainingCLI(
        LightningModule,
        LightningDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        load_from_checkpoint_support=False,  # checkpoints hold no hyperparameters: the config alone makes the objects
        seed_everything_default=0,
        trainer_defaults={"default_root_dir": "runs", "max_epochs": 1, "log_every_n_steps": 1},
        args=None if args is None else list(args),
    )


if __name__ == "__main__":
    main()

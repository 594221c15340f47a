"""LeanGRPO's (arXiv 2609.03528) Table 1 on several processes of this machine: the five rows, each a configuration of the same
``LeanGRPO``, on the embedded model and on small models of the real families; and the paper's own table beside what a cost
model says of it (:mod:`benchmarks.cost_model`).

    python -m benchmarks.scaling [--quick] [--ranks 1 2] [--models shapes flux_dev] [--strategy ddp fsdp2] [--output DIR]

| row                         | layout   | gradients are added up          | schedule |
|-----------------------------|----------|---------------------------------|----------|
| Native                      | per_rank | after each trained step         | Native   |
| Native + Shared             | shared   | after each trained step         | Native   |
| Native + Shared + Coalesced | shared   | once per wave of groups         | Native   |
| Retain                      | shared   | after each trained step         | Retain   |
| Reweight                    | shared   | once per wave of groups         | Reweight |

Rows take turns: each turn trains ``iterations`` iterations after one of warm-up. Processes share this machine's cores and
memory bus, so that more of them do not make a step faster here, and loopback is no network: ratios between rows of the
same number of processes are what to read, and the counts, which are exact. Small models do too little work per sample for
Reweight's single rows to pay (see the README).
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.strategies import DDPStrategy

from benchmarks import cost_model
from benchmarks.processes import on_ranks
from benchmarks.random_weights import untrained
from benchmarks.report import environment_line, table, write_json
from lightning_modules.advantages import GroupAdvantage
from lightning_modules.flow.sigmas import LinearSigmas
from lightning_modules.flow.transitions import FlowSDE
from lightning_modules.flow.windows import AllButLast
from lightning_modules.lean_grpo import LeanGRPO
from lightning_modules.parallel.gradients import Gradient, LocalGradients
from lightning_modules.policies.base import Policy
from lightning_modules.policies.shapes import ShapesPolicy
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from lightning_modules.strategies import FSDP2Strategy
from lightning_modules.types import PromptBatch, Samples, Scores

ROWS: dict[str, tuple[Any, str, str]] = {
    "Native": (Native, "per_rank", "per_step"),
    "Native + Shared": (Native, "shared", "per_step"),
    "Native + Shared + Coalesced": (Native, "shared", "per_group"),
    "Retain": (Retain, "shared", "per_step"),
    "Reweight": (Reweight, "shared", "per_group"),
}
STRATEGIES: dict[str, Any] = {"ddp": DDPStrategy, "fsdp2": FSDP2Strategy}
_BLOCKS = {"num_attention_heads": 2, "attention_head_dim": 16}
SMALLER: dict[str, dict[str, Any]] = {
    "flux_dev": _BLOCKS | {"num_layers": 2, "num_single_layers": 2, "joint_attention_dim": 16,
                           "pooled_projection_dim": 16, "axes_dims_rope": [4, 6, 6]},
    "sd35_medium": _BLOCKS | {"num_layers": 3, "joint_attention_dim": 16, "caption_projection_dim": 32,
                              "pooled_projection_dim": 16, "dual_attention_layers": [0], "pos_embed_max_size": 8},
    "wan21_1_3b": _BLOCKS | {"num_layers": 3, "attention_head_dim": 24, "text_dim": 16, "freq_dim": 16, "ffn_dim": 64},
}  # fmt: skip
"""File in ``configs/model`` -> what makes it small."""
_IMAGE_VAE = {"block_out_channels": [4, 4, 4, 4], "norm_num_groups": 2, "layers_per_block": 1}
SMALLER_VAE = {"flux_dev": _IMAGE_VAE, "sd35_medium": _IMAGE_VAE, "wan21_1_3b": {"base_dim": 4, "num_res_blocks": 1}}
MODELS = ("shapes", *SMALLER)


@dataclass(frozen=True, kw_only=True)
class Work:
    """One iteration of every row."""

    model: str
    trainable: str
    """``full`` or ``lora``; the embedded model is always trained whole."""
    strategy: str
    prompts: int = 2
    generations: int = 4
    num_steps: int = 6
    micro_batch: int | None = 1
    """as the paper's card holds: the ratio of layouts is then not one of batch sizes."""
    turns: int = 3
    iterations: int = 2


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the table."""

    model: str
    trainable: str
    strategy: str
    ranks: int
    row: str
    seconds: float
    """median over turns and iterations, the optimizer's step included."""
    speedup: float
    """over Native on as many ranks."""
    reductions: int
    """per iteration; one = all trainable tensors once."""
    collectives: int
    bytes_reduced: int
    """handed to collectives per iteration and rank."""
    peak_gradient_bytes: int
    """most that a rank's gradient buffers hold at once, the optimizer's own gradient not counted."""
    forward_rows: int
    """policy rows of all ranks."""


class Meter(Callback):
    """Times iterations and scores samples by their ids: rewards cost nothing here."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_rollout_end(self, trainer: Trainer, pl_module: LeanGRPO, samples: Samples, scores: Scores) -> None:
        scores.values["given"] = torch.sin(1.7 * (samples.rows.prompt * 31 + samples.rows.generation).double())

    def on_train_batch_start(self, trainer: Trainer, pl_module: LeanGRPO, batch: Any, batch_idx: int) -> None:
        pl_module.ranks.gather(None)
        self._start = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LeanGRPO, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pl_module.ranks.gather(None)
        self.seconds.append(time.perf_counter() - self._start)


class Buffers:
    """Watches the gradient buffers of a run."""

    def __init__(self, gradients: LocalGradients) -> None:
        self.peak = 0
        self._alive: weakref.WeakSet[Gradient] = weakref.WeakSet()
        make, reduce = gradients.buffer, gradients.reduce

        def buffer() -> Gradient:
            self.look()
            made = make()
            self._alive.add(made)
            return made

        def reduced(total: Gradient) -> Gradient:
            self.look()
            return reduce(total)

        gradients.buffer, gradients.reduce = buffer, reduced  # type: ignore[method-assign]

    def look(self) -> None:
        self.peak = max(self.peak, sum(buffer.nbytes for buffer in self._alive))


def policy(work: Work) -> Policy:
    torch.manual_seed(0)
    if work.model == "shapes":
        return ShapesPolicy()
    side = {"height": 64, "width": 64, "max_sequence_length": 8, "trainable": work.trainable}
    video = {"frames": 1} if work.model.startswith("wan") else {}
    return untrained(
        work.model, dtype="float32", smaller=SMALLER[work.model], smaller_vae=SMALLER_VAE[work.model],
        options=side | video,
    )  # fmt: skip


def module(work: Work, row: str) -> LeanGRPO:
    schedule, layout, sync = ROWS[row]
    return LeanGRPO(
        policy=policy(work),
        schedule=schedule(),
        transition=FlowSDE(0.7),
        sigmas=LinearSigmas(3.0),
        window=AllButLast(),
        advantage=GroupAdvantage(),
        optimizer=partial(torch.optim.AdamW, lr=1e-6),
        num_steps=work.num_steps,
        generations_per_prompt=work.generations,
        micro_batch=work.micro_batch,
        layout=layout,  # type: ignore[arg-type]
        sync=sync,  # type: ignore[arg-type]
        check_ranks_every=0,
    )


class Batches:
    """The same prompts in every iteration; no ``DataLoader``, which would be dealt out over the ranks."""

    def __init__(self, work: Work) -> None:
        self.work = work

    def __len__(self) -> int:
        return self.work.iterations + 1

    def __iter__(self) -> Any:
        texts = ("a red circle", "a blue square", "two green crosses", "a yellow ring")
        prompts = tuple(texts[k % len(texts)] for k in range(self.work.prompts))
        for iteration in range(len(self)):
            yield PromptBatch(prompts=prompts, metadata=({},) * len(prompts), iteration=iteration)


def train(work: Work, row: str, ranks: int) -> dict[str, Any]:
    """One turn of a row, in every process."""
    model, meter = module(work, row), Meter()
    watched: list[Buffers] = []

    class Watch(Callback):
        def on_train_start(self, trainer: Trainer, pl_module: LeanGRPO) -> None:
            watched.append(Buffers(pl_module.schedule.context.gradients))

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Trainer(
            accelerator="cpu", devices=ranks, strategy=STRATEGIES[work.strategy]() if ranks > 1 else "auto", max_epochs=1,
            logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
            default_root_dir=folder, callbacks=[meter, Watch()],
        ).fit(model, Batches(work))  # fmt: skip
    traffic, count = model.schedule.context.gradients.traffic, work.iterations + 1
    return {
        "seconds": meter.seconds[1:],
        "reductions": traffic.reductions // count,
        "collectives": traffic.collectives // count,
        "bytes": traffic.bytes // count,
        "peak": watched[0].peak,
        "forward_rows": int(model.iteration_metrics["rows/forward"]),
    }


def measure(works: Sequence[Work], ranks: int) -> list[Result]:
    """In every process: each row of each work in turn, ``work.turns`` times."""
    results: list[Result] = []
    for work in works:
        taken: dict[str, list[dict[str, Any]]] = {row: [] for row in ROWS}
        for _ in range(work.turns):
            for row in ROWS:
                taken[row].append(train(work, row, ranks))
        results += summed_up(work, ranks, taken)
    return results


def summed_up(work: Work, ranks: int, taken: dict[str, list[dict[str, Any]]]) -> list[Result]:
    medians = {row: statistics.median(s for turn in some for s in turn["seconds"]) for row, some in taken.items()}
    return [
        Result(
            model=work.model,
            trainable="full" if work.model == "shapes" else work.trainable,
            strategy=work.strategy if ranks > 1 else "single",
            ranks=ranks,
            row=row,
            seconds=medians[row],
            speedup=medians["Native"] / medians[row],
            reductions=some[0]["reductions"],
            collectives=some[0]["collectives"],
            bytes_reduced=some[0]["bytes"],
            peak_gradient_bytes=max(turn["peak"] for turn in some),
            forward_rows=some[0]["forward_rows"],
        )
        for row, some in taken.items()
    ]


def measured_table(results: Sequence[Result]) -> str:
    header = (
        "model",
        "trained",
        "ranks",
        "row",
        "s/step",
        "speed-up",
        "reductions",
        "collectives",
        "KiB",
        "peak gradient KiB",
    )
    return table(
        header,
        [
            (
                r.model, r.trainable, f"{r.ranks} {r.strategy}", r.row, f"{r.seconds:.3f}", f"{r.speedup:.2f}x",
                str(r.reductions), str(r.collectives), f"{r.bytes_reduced / 1024:.0f}", f"{r.peak_gradient_bytes / 1024:.0f}",
            )
            for r in results
        ],
    )  # fmt: skip


def model_tables() -> str:
    """The paper's Table 1 and what the cost model says, and its curves over ranks."""
    predictions = cost_model.table_1()
    rows = [
        (p.training, p.row, f"{p.paper:.2f}", f"{p.predicted:.2f}",
         "calibrated on it" if p.row == "Native" else f"{p.error:+.1%}")
        for p in predictions
    ]  # fmt: skip
    curves = [
        (training, str(ranks), f"{speed['Retain']:.2f}x", f"{speed['Reweight']:.2f}x")
        for training, by_ranks in cost_model.curves().items()
        for ranks, speed in by_ranks.items()
    ]
    worst = max(abs(p.error) for p in predictions)
    return "\n".join(
        [
            table(("FLUX.1-dev", "row", "paper, s", "model, s", "error"), rows),
            f"Largest error {worst:.1%}. The model may be wrong: see its docstring for what it leaves out.",
            "",
            table(("FLUX.1-dev", "ranks", "Retain", "Reweight"), curves),
            "Speed-up over Native on as many ranks, predicted; the paper shows these curves (Figure 3, j and k) without",
            "numbers, of which only the ends are stated: 1.44 to 1.81 (full) and 1.26 to 1.43 (LoRA) for Reweight over all f.",
        ]
    )


def main(args: Sequence[str] | None = None) -> list[Result]:
    given = list(sys.argv[1:] if args is None else args)
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="one turn of one iteration: to try the command out")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--trainable", nargs="+", choices=["full", "lora"], default=["full", "lora"])
    parser.add_argument("--strategy", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("outputs/benchmarks"))
    options = parser.parse_args(given)
    if min(options.ranks) < 1 or options.turns < 1:
        raise ValueError(f"ranks={options.ranks}, turns={options.turns}: give numbers of at least 1")
    size: dict[str, Any] = {"turns": options.turns}
    if options.quick:
        size = {"turns": 1, "iterations": 1, "num_steps": 3, "generations": 2}
    works = [
        Work(model=model, trainable=trainable, strategy=strategy, **size)
        for model in options.models
        for trainable in (options.trainable if model != "shapes" else ["full"])
        for strategy in options.strategy
    ]
    results: list[Result] = []
    for ranks in options.ranks:  # one process is the same whatever the strategy
        mine = [work for work in works if ranks > 1 or work.strategy == options.strategy[0]]
        results += on_ranks(ranks, measure, mine, ranks)
        print(f"{ranks} process(es) measured", flush=True)
    print(f"\n{measured_table(results)}\n\n{model_tables()}\n\n{environment_line()}")
    write_json(
        options.output / "scaling.json",
        benchmark="scaling",
        command=shlex.join(["python", "-m", "benchmarks.scaling", *given]),
        settings={"works": [asdict(work) for work in works], "ranks": options.ranks},
        results={
            "measured": [asdict(r) for r in results],
            "model": [asdict(p) | {"error": p.error} for p in cost_model.table_1()],
            "curves": cost_model.curves(),
        },
    )
    return results


if __name__ == "__main__":
    main()

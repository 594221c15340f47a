"""1, 2 and 4 processes: the same numbers and the same files, and training as if nothing had been evaluated."""

import json
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from callbacks.best_checkpoint import BestCheckpoint
from callbacks.ema import EMA
from callbacks.prompt_set_evaluation import PromptSetEvaluation
from lightning_modules.parallel.tensors import whole
from rewards.base import Reward
from tests.loop import Scorer, batches
from tests.rank_runs import STRATEGIES, Case, make_module
from tests.ranks import RankError, pool

TEXTS = ["a red circle", "two blue squares", "a green ring", "a cross above a ring", "a photo of a black square"]


class Brightness(Reward):
    """NaN for one prompt, if asked. The last digits depend on the rest of the batch, as a network's may."""

    def __init__(self, broken=None):
        self.broken = broken

    def score(self, images, prompts, metadata):
        scores = images.double().flatten(1).mean(1) + 1e-9 * images.double().mean()
        scores[[prompt == self.broken for prompt in prompts]] = float("nan")
        return scores


def run(root, strategy, ranks, evaluated=True, broken=None):
    """One iteration with an evaluation before and after it -> this rank's first and last scores, and the weights."""
    root = Path(root)
    file = root / "prompts.jsonl"
    benchmark = PromptSetEvaluation(
        name="set", prompts=str(file), rewards={"r": Brightness(broken)}, main="r", images_per_prompt=3, batch_size=4, every=1,
    )  # fmt: skip
    callbacks = [Scorer(), EMA(decay=0.5), *([benchmark, BestCheckpoint("eval/set")] if evaluated else [])]
    model = make_module(Case(policy="shapes", strategy=strategy, ranks=ranks))
    trainer = Trainer(
        callbacks=callbacks, logger=CSVLogger(root, name="", version="run"), strategy=STRATEGIES[strategy](), devices=ranks,
        accelerator="cpu", max_epochs=1, enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        default_root_dir=root,
    )  # fmt: skip
    trainer.fit(model, batches(1))
    weights = torch.cat([whole(p.detach()).flatten() for p in model.policy.parameters() if p.requires_grad]).clone()
    found = [None if e is None else e.means["r"] for e in (benchmark.first, benchmark.last)]
    return *found, weights, torch.get_rng_state()


def prepared(root):
    root.mkdir()
    rows = [{"prompt": text, "tag": f"t{k % 2}"} for k, text in enumerate(TEXTS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(root)


def files(root, iteration):
    folder = Path(root) / "run" / "evaluations" / "set" / f"iteration_{iteration:06d}"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def without_path(content):
    return {name: value for name, value in json.loads(content).items() if name != "prompts_file"}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A single process: its scores, and the files of its first evaluation."""
    root = prepared(tmp_path_factory.mktemp("ranks") / "alone")
    first, last, *_ = run(root, "single", 1)
    return first, last, files(root, 0)


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp2", 2), ("ddp", 4)])
def test_the_same_numbers_and_files(tmp_path, alone, strategy, ranks):
    """Bit for bit before training; training itself adds up in another order."""
    root = prepared(tmp_path / "many")
    many = pool(ranks).run(run, root, strategy, ranks)
    for first, last, _, _ in many:
        assert torch.equal(first, alone[0])
        torch.testing.assert_close(last, alone[1], rtol=1e-4, atol=0)
    mine, theirs = dict(alone[2]), files(root, 0)
    assert len(mine) == 5 * 3 + 3
    assert without_path(mine.pop("result.json")) == without_path(theirs.pop("result.json"))
    assert theirs == mine
    assert set(files(root, 1)) == set(alone[2])
    assert (Path(root) / "run" / "checkpoints" / "best.ckpt").exists() == (many[0][1].mean() > many[0][0].mean())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_training_is_bitwise_untouched(tmp_path, strategy):
    with_it = pool(2).run(run, prepared(tmp_path / "with"), strategy, 2)
    without = pool(2).run(run, prepared(tmp_path / "without"), strategy, 2, False)
    for (_, _, mine, mine_rng), (_, _, theirs, their_rng) in zip(with_it, without, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine_rng, their_rng)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_failure_on_one_rank_ends_all_and_leaves_nothing(tmp_path, strategy):
    """The prompt's rows are in the first batch, which one rank draws; under FSDP2 the other would wait in its second one."""
    root = prepared(tmp_path / strategy)
    with pytest.raises(RankError) as failure:
        pool(2).run(run, root, strategy, 2, True, TEXTS[0], timeout=25)
    assert "reward 'r' failed in benchmark 'set' at iteration 0 on prompt 'a red circle'" in str(failure.value)
    assert "stuck" not in str(failure.value)
    assert list((Path(root) / "run" / "evaluations" / "set").iterdir()) == []

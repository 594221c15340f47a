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
    """NaN for one prompt, if asked."""

    def __init__(self, broken=None):
        self.broken = broken

    def score(self, images, prompts, metadata):
        scores = images.double().flatten(1).mean(1)
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


def prepared(tmp_path, name):
    root = tmp_path / name
    root.mkdir()
    rows = [{"prompt": text, "tag": f"t{k % 2}"} for k, text in enumerate(TEXTS)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(root)


def files(root, iteration):
    folder = Path(root) / "run" / "evaluations" / "set" / f"iteration_{iteration:06d}"
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


CASES = [("ddp", 2), ("fsdp2", 2), ("ddp", 4)]


def test_the_same_numbers_and_files(tmp_path):
    alone_root = prepared(tmp_path, "alone")
    alone = run(alone_root, "single", 1)
    before = files(alone_root, 0)
    assert len(before) == 5 * 3 + 3
    for strategy, ranks in CASES:
        root = prepared(tmp_path, f"{strategy}{ranks}")
        many = pool(ranks).run(run, root, strategy, ranks)
        for first, last, _, _ in many:
            assert torch.equal(first, alone[0]), (strategy, ranks)
            torch.testing.assert_close(last, alone[1], rtol=1e-4, atol=0)
        theirs = files(root, 0)
        texts = [json.loads(content.pop("result.json")) for content in (theirs, dict(before))]
        for text in texts:
            del text["prompts_file"]
        assert texts[0] == texts[1], (strategy, ranks)
        assert theirs == {name: content for name, content in before.items() if name != "result.json"}
        assert set(files(root, 1)) == set(before)
        assert (Path(root) / "run" / "checkpoints" / "best.json").exists() == (last.mean() > first.mean())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_training_is_bitwise_untouched(tmp_path, strategy):
    with_it = pool(2).run(run, prepared(tmp_path, "with"), strategy, 2)
    without = pool(2).run(run, prepared(tmp_path, "without"), strategy, 2, False)
    for (_, _, mine, mine_rng), (_, _, theirs, their_rng) in zip(with_it, without, strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(mine_rng, their_rng)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_a_failure_on_one_rank_ends_all_and_leaves_nothing(tmp_path, strategy):
    """The prompt's rows are in the last batches, which not every rank draws; under FSDP2 the others would wait."""
    root = prepared(tmp_path, strategy)
    with pytest.raises(RankError) as failure:
        pool(2).run(run, root, strategy, 2, True, TEXTS[4], timeout=40)
    assert "reward 'r' failed in benchmark 'set' at iteration 0 on prompt 'a photo of a black square'" in str(
        failure.value
    )
    assert "stuck" not in str(failure.value)
    assert list((Path(root) / "run" / "evaluations" / "set").iterdir()) == []

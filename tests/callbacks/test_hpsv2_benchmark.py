import json

import numpy as np
import pytest
import torch

from callbacks.hpsv2_benchmark import HPSv2Benchmark
from callbacks.results import read_result
from rewards.base import Reward
from rewards.hpsv2 import HPSv2
from tests.callbacks.miniature import make_module

STYLES = {"anime": 20, "photo": 20}


class ByNumber(Reward):
    """Raw scores that depend on the prompt's number alone."""

    def score(self, images, prompts, metadata):
        return torch.tensor([raw(row) for row in metadata], dtype=torch.float64)


def raw(row):
    return 0.2 + 0.001 * ((row["number"] * 7) % 13) + (0.05 if row["style"] == "photo" else 0.0)


def rows(styles=STYLES):
    """Style after style, as the prepared file has them."""
    return [
        {"prompt": f"{style} {k}", "style": style, "number": k} for style, count in styles.items() for k in range(count)
    ]


@pytest.fixture
def evaluate(make_trainer, make_data, tmp_path):
    def run(lines, **changes):
        file = tmp_path / "hpdv2.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in lines))
        benchmark = HPSv2Benchmark(**({"prompts": str(file), "reward": ByNumber()} | changes))
        make_trainer(benchmark, limit_val_batches=1).validate(make_module(), datamodule=make_data(), verbose=False)
        folder = tmp_path / "run" / "evaluations" / "hpsv2" / "iteration_000000"
        return folder, read_result(folder)

    return run


def test_means_per_style_and_their_spread_over_ten_chunks(evaluate):
    """As the package has it: numpy's std of the chunks' means, 100 times the raw score."""
    folder, result = evaluate(rows())
    scores = {style: 100 * np.array([raw(row) for row in rows() if row["style"] == style]) for style in STYLES}
    for style, of_style in scores.items():
        assert result["metrics"][style]["mean"] == pytest.approx(of_style.mean())
        chunks = [of_style[k : k + 2].mean() for k in range(0, 20, 2)]
        assert result["other"][f"std_over_chunks/{style}"] == pytest.approx(np.std(chunks))
    assert result["metrics"]["overall"]["mean"] == pytest.approx(np.concatenate(list(scores.values())).mean())
    assert next(iter(result["metrics"])) == "overall"
    assert result["settings"]["rewards"]["hpsv2"]["times"] == 100.0
    assert result["settings"]["prompts"]["category"] == "style"


def test_the_layout_of_the_package(evaluate):
    folder, _ = evaluate(rows(), images_per_prompt=2)
    for style in STYLES:
        names = sorted(path.name for path in (folder / "images" / style).iterdir())
        assert len(names) == 40 and names[:3] == ["00000.png", "00000_1.png", "00001.png"]
    lines = [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]
    assert lines[40]["filename"] == "images/photo/00000.png" and lines[40]["prompt"] == "photo 0"


def test_styles_that_alternate_are_put_one_after_the_other(evaluate):
    straight = evaluate(rows())[1]
    mixed = [row for pair in zip(*[rows()[:20], rows()[20:]], strict=True) for row in pair]
    assert evaluate(mixed)[1]["prompts"] == straight["prompts"]


def test_a_subset_is_spread_evenly_over_each_style(evaluate):
    _, result = evaluate(rows(), subset=20)
    assert [row["prompt"] for row in result["prompts"]] == [f"{style} {k}" for style in STYLES for k in range(0, 20, 2)]
    whole = evaluate(rows())[1]
    assert result["settings"]["prompts"]["sha256"] != whole["settings"]["prompts"]["sha256"]


def test_the_real_sizes():
    benchmark = HPSv2Benchmark(prompts="x", reward=ByNumber(), subset=400)
    styles = dict.fromkeys(("anime", "concept-art", "paintings", "photo"), 800)
    from datamodules.prompts import Prompt

    prompts = [Prompt(text=row["prompt"], metadata=row) for row in rows(styles)]
    chosen = benchmark.choose(prompts)
    assert len(chosen) == 400
    assert [prompt.metadata["number"] for prompt in chosen[100:104]] == [0, 8, 16, 24]
    benchmark.subset = None
    assert len(benchmark.choose(prompts)) == 3200


@pytest.mark.parametrize(
    ("prompts", "changes", "message"),
    [
        ([{"prompt": "a"}], {}, "prompt 'a' of .* names no style.*datamodules.prepare hpdv2"),
        ([{"prompt": "a", "style": "../b"}], {}, r"names no style that a folder can be called by \('../b'\)"),
        ([{"prompt": "a", "style": "/b"}], {}, "names no style"),
        ([{"prompt": "a", "style": ".."}], {}, "names no style"),
        (rows({"anime": 19}), {}, "has 19 prompts of the style 'anime', which do not make 10 equal chunks"),
        (rows(), {"subset": 30}, "subset=30: the 2 styles .* give a multiple of 20, at most 40"),
        (rows(), {"subset": 60}, "subset=60: .*at most 40"),
        (rows(), {"prompts": "/nowhere"}, "hpdv2.jsonl.*`python -m datamodules.prepare hpdv2 --to /nowhere`"),
    ],
)
def test_what_is_no_benchmark_is_refused(evaluate, prompts, changes, message):
    with pytest.raises(ValueError, match=message):
        evaluate(prompts, **changes)


def test_a_reward_that_is_scaled_already_is_refused():
    with pytest.raises(ValueError, match="scale='x100': the benchmark multiplies by 100"):
        HPSv2Benchmark(prompts="x", reward=HPSv2(version="v2.1", scale="x100"))
    HPSv2Benchmark(prompts="x", reward=HPSv2(version="v2.1"))

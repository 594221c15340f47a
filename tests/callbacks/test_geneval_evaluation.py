"""GenEval on the embedded shapes, through the code that judges COCO's objects: only detector and colours are others'."""

import json

import pytest
import torch

from callbacks.geneval_evaluation import GenEvalEvaluation
from callbacks.results import read_result
from callbacks.reward_scoring import RewardScoring
from datamodules.prompts import load_prompts
from lightning_modules.policies.shapes import ShapesPolicy
from rewards.geneval import GenEval
from rewards.geneval_summary import TAGS, summarise
from rewards.shapes import ShapesReward
from rewards.shapes_vision import ShapesColors, ShapesDetector
from rewards.vision import Detector
from tests.callbacks.miniature import make_module

HELD_OUT = "datamodules/shapes_prompts/heldout_metadata.jsonl"


def judge(detector=None, **changes):
    return GenEval(
        detector=detector or ShapesDetector(), colors=ShapesColors(), threshold=0.0, counting_threshold=0.0, **changes
    )  # fmt: skip


def some(per_tag=1):
    """The first held-out prompts of each tag."""
    rows = [prompt.metadata for prompt in load_prompts(HELD_OUT)]
    return [row for tag in TAGS for row in [r for r in rows if r["tag"] == tag][:per_tag]]


@pytest.fixture
def evaluate(make_trainer, make_data, tmp_path):
    """The folder and result of an evaluation by ``validate``."""

    def run(prompts, module=None, the_judge=None, **changes):
        file = tmp_path / "shapes.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in prompts))
        settings = {"images_per_prompt": 2, "batch_size": 32} | changes
        benchmark = GenEvalEvaluation(prompts=str(file), judge=the_judge or judge(), **settings)
        trainer = make_trainer(benchmark, limit_val_batches=1)
        trainer.validate(module or make_module(policy=ShapesPolicy()), datamodule=make_data(prompts[:1]), verbose=False)
        folder = tmp_path / "run" / "evaluations" / benchmark.name / "iteration_000000"
        return folder, read_result(folder)

    return run


def lines_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_the_numbers_are_those_of_the_rules_on_the_modules_images(evaluate):
    prompts, module = some(2), make_module(policy=ShapesPolicy())
    folder, result = evaluate(prompts, module)
    ids = torch.tensor([(p, i) for p in range(12) for i in range(2)])
    texts = [prompts[p]["prompt"] for p in ids[:, 0].tolist()]
    images = module.sample(texts, prompt_index=ids[:, 0], image_index=ids[:, 1])
    metadata = [prompts[p] for p in ids[:, 0].tolist()]
    expected = {
        mode: ShapesReward(mode)((images * 255).round() / 255, texts, metadata)
        for mode in ("correct", "strict", "soft")
    }
    for mode, scores in expected.items():
        found = [score for row in result["prompts"] for score in row["scores"][mode]]
        assert found == pytest.approx(scores.tolist())
    metrics = {name: row["mean"] for name, row in result["metrics"].items()}
    correct = expected["correct"].reshape(6, 4)  # tags x their images
    assert 0 < correct.sum() < 24
    assert [metrics[tag] for tag in TAGS] == pytest.approx(correct.mean(1).tolist())
    assert metrics["overall"] == pytest.approx(correct.mean(1).mean().item())
    assert metrics["accuracy_over_images"] == pytest.approx(correct.mean().item())
    assert metrics["soft"] == pytest.approx(expected["soft"].mean().item())
    assert next(iter(metrics)) == "overall"


def test_tags_of_different_sizes_are_where_the_two_accuracies_differ(evaluate):
    prompts = some(1) + [row for row in some(6) if row["tag"] == "single_object"][1:]
    folder, result = evaluate(prompts)
    metrics, summary = result["metrics"], result["other"]["summary"]
    assert metrics["overall"]["mean"] != metrics["accuracy_over_images"]["mean"]
    official = summarise(lines_of(folder))
    assert official.as_dict() == summary
    assert metrics["overall"]["mean"] == pytest.approx(official.overall)
    assert metrics["accuracy_over_images"]["mean"] == pytest.approx(official.accuracy_over_images)
    assert {tag: metrics[tag]["mean"] for tag in TAGS} == pytest.approx(official.per_tag)


def test_the_official_layout(evaluate):
    prompts = some(1)[:2]
    folder, _ = evaluate(prompts, images_per_prompt=3)
    files = sorted(
        str(path.relative_to(folder / "images")) for path in (folder / "images").rglob("*") if path.is_file()
    )
    assert files == [
        f"{p:05d}/{file}" for p in range(2) for file in ("metadata.jsonl", *(f"samples/{i:04d}.png" for i in range(3)))
    ]
    assert json.loads((folder / "images/00001/metadata.jsonl").read_text()) == prompts[1]
    lines = lines_of(folder)
    assert [line["filename"] for line in lines][:4] == [
        "images/00000/samples/0000.png",
        "images/00000/samples/0001.png",
        "images/00000/samples/0002.png",
        "images/00001/samples/0000.png",
    ]
    assert all(set(line) == {"filename", "tag", "prompt", "correct", "reason", "metadata", "details"} for line in lines)
    assert json.loads(lines[-1]["metadata"]) == prompts[1]
    assert all(line["correct"] is (line["reason"] == "") for line in lines)


def test_it_is_named_by_its_detector_and_tells_its_judge(evaluate):
    folder, result = evaluate(some(1)[:1], the_judge=judge(position_threshold=0.2))
    assert result["name"] == "geneval_shapes"
    (identity,) = result["settings"]["rewards"].values()
    assert identity["position_threshold"] == 0.2
    assert "mode" not in identity
    assert GenEvalEvaluation(prompts=HELD_OUT, judge=GenEval()).name == "geneval_hf"


def test_without_all_six_tags_the_mean_has_another_name(evaluate):
    _, result = evaluate(some(1)[:3])
    assert "overall" not in result["metrics"] and next(iter(result["metrics"])) == "mean_over_tags"
    assert result["other"]["summary"]["overall"] is None


def test_in_fit_it_is_logged_by_tag(make_trainer, make_data, tmp_path):
    file = tmp_path / "shapes.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in some(1)))
    benchmark = GenEvalEvaluation(prompts=str(file), judge=judge(), images_per_prompt=1, before=False)
    training = RewardScoring({"dense": ShapesReward("dense")})
    module = make_module(policy=ShapesPolicy())
    make_trainer(training, benchmark).fit(module, datamodule=make_data(some(1), iterations=1))
    logged = (tmp_path / "run" / "metrics.csv").read_text()
    assert {"eval/geneval_shapes", *(f"eval/geneval_shapes/{tag}" for tag in TAGS)} <= set(
        logged.splitlines()[0].split(",")
    )


class Blind(Detector):
    name = "blind"
    classes = ShapesDetector.classes

    def detect(self, images, min_score):
        return [[] for _ in images]


def test_a_detector_that_finds_nothing_is_suspected(evaluate):
    with pytest.warns(UserWarning, match="nothing at all was detected in 12 of 12 images.*detector is at fault"):
        _, result = evaluate(some(1), the_judge=judge(Blind()))
    assert result["other"]["summary"]["images_without_objects"] == 12


def test_prompts_of_another_kind_are_refused_before_any_work(evaluate):
    with pytest.raises(ValueError, match="has the tag None, GenEval's are .*datamodules.prepare geneval"):
        evaluate([{"prompt": "a red circle"}])


def test_missing_files_stop_it_before_any_work(make_trainer, make_data, tmp_path):
    missing = GenEvalEvaluation(prompts=str(tmp_path / "nowhere"), judge=judge())
    with pytest.raises(
        ValueError, match=r"nowhere/geneval_metadata.jsonl.*`python -m datamodules.prepare geneval --to"
    ):
        make_trainer(missing, limit_val_batches=1).validate(make_module(), datamodule=make_data())
    from rewards.mask2former import Mask2Former

    weights = GenEvalEvaluation(prompts=HELD_OUT, judge=judge(Mask2Former(str(tmp_path / "weights"))))
    with pytest.raises(ValueError, match=r"Mask2Former: no folder .*weights"):
        make_trainer(weights, limit_val_batches=1).validate(make_module(), datamodule=make_data())


def test_the_prepared_folder_is_enough(make_trainer, make_data, tmp_path):
    (tmp_path / "geneval_metadata.jsonl").write_text(json.dumps(some(1)[0]) + "\n")
    benchmark = GenEvalEvaluation(prompts=str(tmp_path), judge=judge(), images_per_prompt=1)
    trainer = make_trainer(benchmark, limit_val_batches=1)
    trainer.validate(make_module(policy=ShapesPolicy()), datamodule=make_data(some(1)[:1]), verbose=False)
    assert len(benchmark.last.prompts) == 1


def test_another_judge_is_refused():
    with pytest.raises(ValueError, match="judge is a ShapesReward"):
        GenEvalEvaluation(prompts=HELD_OUT, judge=ShapesReward())

"""The judge between detector, colours and rules, on detectors that find what a test says."""

import json
from pathlib import Path

import pytest
import torch

from datamodules import shapes_world
from rewards.check import check_reward
from rewards.clip_colors import WEIGHTS_FILE, CLIPColors
from rewards.geneval import GenEval
from rewards.images import as_batch, eight_bit
from rewards.mask2former import Mask2Former
from rewards.shapes import ShapesReward
from rewards.shapes_vision import ShapesColors, ShapesDetector
from rewards.vision import ColorClassifier, Detector, Instance
from tests.rewards.tiny_clip import OPEN_CLIP, pictures, randomise
from tests.rewards.tiny_mask2former import write_mask2former

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "geneval_rules.json").read_text())
SIZE = 8


class Told(Detector):
    """Finds in image n what ``scenes[n]`` lists: (class, score, box, colour). The image's first pixel is n / 255."""

    name = "told"
    classes = Mask2Former.classes

    def __init__(self, *scenes):
        super().__init__()
        self.scenes, self.asked, self.true_color = scenes, [], {}

    def detect(self, images, min_score):
        self.asked.append(min_score)
        return [self._instances(self.scenes[round(image[0, 0, 0].item() * 255)], min_score) for image in images]

    def _instances(self, scene, min_score):
        found = []
        for name, score, box, color in scene:
            if score > min_score:
                mask = torch.zeros(SIZE, SIZE, dtype=torch.bool)
                found.append(Instance(class_name=name, score=score, box=tuple(box), mask=mask))
                self.true_color[id(mask)] = color
        return found


class Knows(ColorClassifier):
    """Remembers what it was asked: the scores of the objects of each call."""

    colors = CLIPColors.colors

    def __init__(self, detector):
        super().__init__()
        self.detector, self.asked = detector, []

    def classify(self, image, instances):
        self.asked.append([item.score for item in instances])
        return [self.detector.true_color[id(item.mask)] for item in instances]


def told(*scenes, **options):
    detector = Told(*scenes)
    return GenEval(detector=detector, colors=Knows(detector), **options)


def numbered(count):
    images = torch.zeros(count, 3, SIZE, SIZE)
    images[:, 0, 0, 0] = torch.arange(count) / 255
    return images


def row(*include, tag="single_object", **more):
    return {"tag": tag, "prompt": "a photo", "include": list(include), **more}


def clause(name="cat", count=1, **more):
    return {"class": name, "count": count, **more}


def cat(score, color="red", box=(0, 0, 4, 4)):
    return ("cat", score, box, color)


def score(reward, images, metadata):
    return reward(images, [""] * len(images), metadata).tolist()


# -- the golden rules, through the judge ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["soft", "strict", "correct"])
def test_golden_cases(mode):
    """All cases in one batch, shuffled within each image: every mode as the rules alone give it."""
    scenes = [
        [(name, o["score"], o["box"], o["color"]) for name, objects in case["detections"].items() for o in objects][
            ::-1
        ]
        for case in GOLDEN
    ]
    reward = told(*scenes, mode=mode, threshold=0.0, counting_threshold=0.0)
    key = {"soft": "soft_score", "strict": "strict_correct", "correct": "correct"}[mode]
    actual = score(reward, numbered(len(GOLDEN)), [case["metadata"] for case in GOLDEN])
    assert actual == pytest.approx([float(case[key]) for case in GOLDEN], abs=1e-6)
    assert len(set(actual)) > 1


# -- thresholds and limits --------------------------------------------------------------------------------------------


def test_the_threshold_is_the_tags():
    """0.3 must be exceeded, 0.9 in counting; what is asked of the detector is the least that the batch needs."""
    scene = [cat(0.3), cat(0.31), cat(0.9), cat(0.91)]
    reward = told(scene, scene, mode="strict")
    rows = [row(clause(count=3)), row(clause(), tag="counting")]
    assert score(reward, numbered(2), rows) == [1.0, 1.0]
    assert score(reward, numbered(1), [row(clause(count=3), tag="counting")]) == [0.0]
    assert reward.detector.asked == [0.3, 0.9]


def test_at_most_sixteen_of_a_class():
    scene = [cat(0.4 + n / 100) for n in range(20)] + [("dog", 0.5, (0, 0, 1, 1), "red")]
    assert score(told(scene, mode="strict"), numbered(1), [row(clause(count=16), clause("dog"))]) == [1.0]
    assert score(told(scene, mode="strict", max_per_class=18), numbered(1), [row(clause(count=18))]) == [1.0]
    (verdict,) = told(scene).evaluate(numbered(1), [row(clause())])
    assert list(verdict.objects) == ["cat", "dog"]  # the detector's order
    assert [item["score"] for item in verdict.objects["cat"]] == [0.4 + n / 100 for n in range(19, 3, -1)]


def test_the_position_threshold():
    scene = [("cat", 0.9, (0, 0, 20, 20), "red"), ("dog", 0.9, (9, 0, 29, 20), "red")]
    rows = [row(clause(), clause("dog", position=["right of", 0]), tag="position")]
    assert score(told(scene, mode="correct"), numbered(1), rows) == [1.0]
    assert score(told(scene, mode="correct", position_threshold=0.2), numbered(1), rows) == [0.0]


# -- colours ----------------------------------------------------------------------------------------------------------


def test_only_the_best_of_a_class_whose_colour_is_asked_for_are_looked_at():
    scene = [cat(0.5, "blue"), cat(0.8, "red"), ("dog", 0.9, (0, 0, 4, 4), "white")]
    reward = told(scene, mode="correct")
    assert score(reward, numbered(1), [row(clause(color="red"), clause("dog"), tag="color_attr")]) == [1.0]
    assert reward.colors.asked == [[0.8]]
    (verdict,) = reward.evaluate(numbered(1), [row(clause(color="blue"))])
    assert (verdict.judgement.correct, verdict.judgement.reason) == (False, "wanted 1 blue cat, found red")
    assert [item["color"] for item in verdict.objects["cat"]] == ["red", ""]


def test_no_colour_is_asked_for_where_the_count_already_fails():
    reward = told([cat(0.5)])
    assert score(reward, numbered(1), [row(clause(count=2, color="red"))]) == [(1 / 2 + 0) / 2]
    assert score(reward, numbered(1), [row(clause())]) == [1.0]
    assert reward.colors.asked == []


# -- metadata that cannot be judged -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"prompt": "a cat"}, "use prompts with GenEval metadata"),
        ({"include": [clause()]}, r"metadata\['tag'\] is None .*threshold"),
        (row(clause("keyboard")), "class 'keyboard' is unknown to Told: use one of person, .*computer keyboard"),
        (row(clause(), exclude=[clause("unicorn")]), "class 'unicorn' is unknown"),
        (row(clause(color="mauve")), "color 'mauve' is unknown to Knows: use one of red, orange"),
    ],
)
def test_nothing_is_detected_for_metadata_that_cannot_be_judged(metadata, message):
    reward = told([], [])
    for call in (lambda rows: score(reward, numbered(2), rows), lambda rows: reward.evaluate(numbered(2), rows)):
        with pytest.raises(ValueError, match=message):
            call([row(clause()), metadata])
    assert reward.detector.asked == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "dense"}, "mode='dense': choose one of soft, strict, correct"),
        ({"threshold": 1.0}, "threshold=1.0: give a confidence"),
        ({"counting_threshold": -0.1}, "counting_threshold=-0.1: give a confidence"),
        ({"max_per_class": 0}, "max_per_class=0"),
        ({"position_threshold": -1.0}, "position_threshold=-1.0"),
    ],
)
def test_arguments_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        GenEval(**options)


def test_evaluate_checks_its_input_as_scoring_does():
    reward = told([])
    with pytest.raises(ValueError, match=r"expected \[0, 1\]"):
        reward.evaluate(numbered(1) + 2, [row(clause())])
    with pytest.raises(ValueError, match="1 images, 2 metadata"):
        reward.evaluate(numbered(1), [row(clause())] * 2)
    with pytest.raises(ValueError, match="GenEval scores images"):
        reward.evaluate(torch.zeros(1, 3, 2, SIZE, SIZE), [row(clause())])
    assert reward.evaluate(torch.zeros(0, 3, SIZE, SIZE), []) == []


# -- the shapes world, by the same judge ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["soft", "strict", "correct"])
def test_the_shapes_world_scores_as_its_own_reward_does(mode):
    generator = torch.Generator().manual_seed(3)
    metadata = shapes_world.split_prompts()[1]
    images = torch.stack([shapes_world.render(item, generator) for item in metadata])
    images = torch.cat([images, images.roll(1, 0)])  # right ones and wrong ones
    metadata = metadata * 2
    reward = GenEval(mode=mode, detector=ShapesDetector(), colors=ShapesColors(), threshold=0.0, counting_threshold=0.0)
    expected = score(ShapesReward(mode), images, metadata)
    assert score(reward, images, metadata) == pytest.approx(expected, abs=1e-6)
    assert len(set(expected)) > 1
    assert reward.name == "geneval_shapes"


def test_the_shapes_judge_is_fit_to_train_on():
    reward = GenEval(detector=ShapesDetector(), colors=ShapesColors(), threshold=0.0, counting_threshold=0.0)
    assert all(finding.passed for finding in check_reward(reward, reads="shapes"))


# -- the default parts on tiny networks -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    import open_clip
    from safetensors.torch import save_file

    folder = write_mask2former(tmp_path_factory.mktemp("parts"))
    (folder / "tiny.json").write_text(json.dumps(OPEN_CLIP | {"quick_gelu": True}))
    save_file(randomise(open_clip.CLIP(**OPEN_CLIP, quick_gelu=True), 3).state_dict(), folder / WEIGHTS_FILE)
    return folder


def tiny(files, **options):
    detector = Mask2Former(str(files), short_side=64, long_side=120)
    return GenEval(
        detector=detector, colors=CLIPColors(str(files), str(files / "tiny.json")), threshold=0.05, **options
    )


def shown_and_asked(files):
    """Three pictures, and prompts that ask for a colour of what the tiny network sees in them."""
    images = as_batch(pictures(*[(48, 36)] * 3))
    seen = tiny(files).evaluate(images, [row(clause())] * 3)
    best = [max(verdict.objects, key=lambda name: verdict.objects[name][0]["score"]) for verdict in seen]
    return images, [
        row(clause(name, len(verdict.objects[name]), color=color), clause("person"), tag="color_attr")
        for name, verdict, color in zip(best, seen, ("brown", "red", "green"), strict=True)
    ]


def test_the_same_scores_from_bytes_and_floats_in_batches_of_any_size(files):
    images, metadata = shown_and_asked(files)
    reward = tiny(files)
    expected = score(reward, images, metadata)
    assert len(set(expected)) > 1
    assert score(reward, as_batch(eight_bit(images)), metadata) == expected
    alone = [score(reward, image[None], [item])[0] for image, item in zip(images, metadata, strict=True)]
    assert alone == pytest.approx(expected, abs=1e-5)


def test_its_networks_are_read_once_and_moved_together(files):
    reward = tiny(files, dtype="bfloat16")
    images, metadata = shown_and_asked(files)
    assert all(-1 <= value <= 1 for value in score(reward, images, metadata))
    assert set(reward.networks) == {"detector", "colors"}
    for network in reward.networks.values():
        assert next(network.parameters()).dtype == torch.bfloat16
        assert not network.training and not any(p.requires_grad for p in network.parameters())
    reward.to("meta")
    assert {next(network.parameters()).device.type for network in reward.networks.values()} == {"meta"}


def test_identity_says_what_the_numbers_are(files):
    identity = tiny(files, mode="correct").identity()
    assert identity["name"] == "geneval_hf"
    assert "not mmdetection's" in identity["protocol"]
    assert (identity["mode"], identity["counting_threshold"], identity["max_per_class"]) == ("correct", 0.9, 16)
    assert identity["detector"]["model"] == str(files)
    assert {name: len(sha) for name, sha in identity["weights"].items()} == {"detector": 64, "colors": 64}
    json.dumps(identity)


def test_the_default_parts_are_the_official_ones_and_missing_files_are_one_message():
    reward = GenEval()
    assert isinstance(reward.detector, Mask2Former) and isinstance(reward.colors, CLIPColors)
    assert (reward.threshold, reward.counting_threshold, reward.position_threshold) == (0.3, 0.9, 0.1)
    with pytest.raises(
        ValueError, match="Mask2Former: no config.json.*run `hf download facebook/mask2former-swin-small"
    ):
        reward.load()

import runpy
import sys

import pytest
import torch
import yaml

from rewards.base import Reward
from rewards.brightness import Brightness
from rewards.check import check_reward, main, named_rewards, probe_reward
from rewards.known_pairs import Pair, scenes, shapes, words
from rewards.shapes import ShapesReward
from rewards.video import FirstFrame, VideoReward


class Matcher(Reward):
    """A perfect judge of the drawn scenes: 1 where the image is the one that the prompt belongs to."""

    known = {pair.prompt: pair.image for pair in scenes()}

    def score(self, images, prompts, metadata):
        match = [torch.equal(image, self.known[prompt]) for image, prompt in zip(images, prompts, strict=True)]
        return torch.tensor(match).double()


class Swapped(Matcher):
    """Takes the next sample's prompt."""

    def score(self, images, prompts, metadata):
        return super().score(images, [*prompts[1:], prompts[0]], metadata)


class Inverted(Matcher):
    def score(self, images, prompts, metadata):
        return -super().score(images, prompts, metadata)


class Unchecked(Matcher):
    def __call__(self, images, prompts, metadata):
        return self.score(images, prompts, metadata)


class Constant(Matcher):
    def score(self, images, prompts, metadata):
        return torch.full((len(images),), 0.5)


class NotFinite(Matcher):
    def score(self, images, prompts, metadata):
        level = images.mean((1, 2, 3))
        return torch.where(level == 0, torch.nan, level)


class Random(Matcher):
    def score(self, images, prompts, metadata):
        return super().score(images, prompts, metadata) + 1e-3 * torch.rand(len(images)).double()


class BatchNormalised(Matcher):
    def score(self, images, prompts, metadata):
        scores = super().score(images, prompts, metadata)
        return scores + 1e-3 * len(images)


class Destructive(Matcher):
    def score(self, images, prompts, metadata):
        scores = super().score(images, prompts, metadata)
        images.mul_(0.5)
        return scores


class LikesNoise(Matcher):
    """Follows the prompt, but likes noise better than anything."""

    def score(self, images, prompts, metadata):
        return super().score(images, prompts, metadata) + 50 * (images[..., 1:] - images[..., :-1]).abs().mean(
            (1, 2, 3)
        )


class Broken(Matcher):
    def score(self, images, prompts, metadata):
        raise RuntimeError("out of memory")


class StillVideos(VideoReward):
    def score_videos(self, videos, prompts, metadata):
        return Matcher().score(videos[:, :, 0], prompts, metadata)


def passed(reward, **settings):
    return {finding.probe: finding.passed for finding in probe_reward(reward, **settings)}


ALL = {"range", "finite", "deterministic", "batch", "prompts", "images"}


@pytest.mark.parametrize(
    ("reward", "reads"),
    [
        (Matcher(), "prompt"),
        (FirstFrame(Matcher()), "prompt"),
        (StillVideos(fps=8.0), "prompt"),
        (ShapesReward("dense"), "shapes"),
        (ShapesReward("correct"), "shapes"),
    ],
)
def test_sound_rewards_pass_every_probe(reward, reads):
    assert passed(reward, reads=reads) == dict.fromkeys(ALL, True)


def test_the_ocr_reward_passes_every_probe(ocr):
    findings = {finding.probe: finding for finding in check_reward(ocr, pairs=words()[:2])}
    assert {name: finding.passed for name, finding in findings.items()} == dict.fromkeys(ALL, True)
    assert findings["prompts"].detail.startswith("own prompts 1, shuffled 0.0")


def test_an_image_reward_is_asked_for_no_ordering():
    assert passed(Brightness(), reads="image") == {**dict.fromkeys(ALL, True), "images": None}


def test_without_drawable_pairs_the_orderings_wait_for_photographs():
    class Counts(Reward):
        """Any detector: how many objects are wanted, and the image's level."""

        reads = "objects"

        def score(self, images, prompts, metadata):
            level = images.mean((1, 2, 3))
            return torch.stack([v * row["include"][0]["count"] for v, row in zip(level, metadata, strict=True)])

    undrawn = passed(Counts())
    assert undrawn["prompts"] is None and undrawn["images"] is None and undrawn["batch"] is True
    bright, brighter = torch.full((3, 8, 8), 0.9), torch.full((3, 8, 8), 0.95)
    pairs = [
        Pair(image=bright, prompt="two dogs", metadata={"include": [{"class": "dog", "count": 2}]}),
        Pair(image=brighter, prompt="three dogs", metadata={"include": [{"class": "dog", "count": 3}]}),
    ]
    assert passed(Counts(), pairs=pairs)["prompts"] is True  # 0.9 * 2 + 0.95 * 3 > 0.9 * 3 + 0.95 * 2
    with pytest.raises(ValueError, match="images: white images score"):
        check_reward(Counts(), pairs=pairs)


@pytest.mark.parametrize(
    ("reward", "reads", "reason"),
    [
        (Unchecked(), None, r"range: images in \[-1, 1\] get a score"),
        (Constant(), None, "finite: every image gets 0.5"),
        (NotFinite(), None, r"finite: black images get the scores \[nan"),
        (Broken(), None, "finite: the reward fails with RuntimeError: out of memory"),
        (Random(), None, "deterministic: the same images get scores that differ by"),
        (Destructive(), None, "deterministic: .*changes the images"),
        (BatchNormalised(), None, "batch: scored one by one instead of together, scores differ by 0.003"),
        (Swapped(), None, "finite: every image gets 0"),
        (Inverted(), None, "prompts: images score -1 with their own prompts and 0 with others'"),
        (LikesNoise(), None, "images: noise images score"),
        (Brightness(), "prompt", "prompts: .*declare `reads = 'image'`"),
        (Matcher(), "image", "prompts: the score depends on the prompt"),
    ],
)
def test_a_faulty_reward_is_refused_with_the_reason(reward, reads, reason):
    with pytest.raises(ValueError, match=f"{type(reward).__name__} is refused: .*{reason}"):
        check_reward(reward, reads=reads)


def test_a_tolerance_admits_low_precision():
    assert passed(Random(), tolerance=1e-2)["deterministic"] is True


def test_bad_arguments():
    with pytest.raises(ValueError, match="reads = 'smell'"):
        check_reward(Matcher(), reads="smell")
    with pytest.raises(ValueError, match="1 pairs: give at least two"):
        check_reward(Matcher(), pairs=scenes()[:1])


@pytest.mark.parametrize("draw", [scenes, words, shapes])
def test_drawings_are_distinct_images_in_range(draw):
    images = torch.stack([pair.image for pair in draw()])
    assert images.dtype == torch.float32 and images.min() >= 0 and images.max() <= 1
    assert all(not torch.equal(a, b) for i, a in enumerate(images) for b in images[:i])
    assert all(image.std() > 0.01 for image in images)
    assert len({pair.prompt for pair in draw()}) == len(images)


def test_rewards_are_found_anywhere_in_a_config(tmp_path):
    soft = {"class_path": "rewards.shapes.ShapesReward", "init_args": {"mode": "soft"}}
    frame = {"class_path": "rewards.video.FirstFrame", "init_args": {"reward": soft}}
    trainer = {
        "callbacks": [
            {"class_path": "json.JSONDecoder"},
            {"class_path": "fractions.Fraction.from_float"},
            {"init_args": {"rewards": {"a": soft, "b": frame}}},
        ]
    }
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump({"trainer": trainer, "test": {"again": soft}}))
    places = {"trainer.callbacks[2].init_args.rewards.a", "trainer.callbacks[2].init_args.rewards.b"}
    assert named_rewards(config).keys() in (places, {"test.again", "trainer.callbacks[2].init_args.rewards.b"})


def test_the_command_reports_and_exits_by_the_verdict(tmp_path, capsys):
    shapes_config = tmp_path / "shapes.yaml"
    shapes_config.write_text("class_path: rewards.shapes.ShapesReward\ninit_args: {mode: soft}\n")
    assert main(["--config", str(shapes_config), "--reads", "shapes"]) == 0
    printed = capsys.readouterr().out
    assert "reward: rewards.shapes.ShapesReward, reads shapes" in printed and "fit to train on" in printed
    brightness = [
        "--reward.class_path",
        "rewards.brightness.Brightness",
        "--reward.init_args.target",
        "[0.1, 0.2, 0.3]",
    ]
    assert main([*brightness, "--reads", "image"]) == 0
    assert main([*brightness, "--reads", "prompt"]) == 1
    assert "REFUSED prompts" in capsys.readouterr().out


def test_a_reward_that_cannot_be_made_is_refused(tmp_path, capsys):
    config = tmp_path / "bad.yaml"
    config.write_text("class_path: rewards.shapes.ShapesReward\ninit_args: {mode: loud}\n")
    assert main(["--config", str(config)]) == 1
    assert "reward is refused" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "complaint"),
    [
        ([], "give either --reward or --config"),
        (["--config", "missing.yaml"], "cannot read missing.yaml"),
    ],
)
def test_unusable_arguments_exit_with_2(args, complaint, capsys):
    with pytest.raises(SystemExit) as exit:
        main(args)
    assert exit.value.code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("class_path", "complaint"),
    [
        ("rewards.brightness.Darkness", "there is no rewards.brightness.Darkness"),
        ("broken.Reward", "cannot import broken"),
    ],
)
def test_a_class_that_cannot_be_imported_does_not_go_unchecked(tmp_path, monkeypatch, class_path, complaint):
    (tmp_path / "broken.py").write_text("import a_package_that_is_not_installed\n")
    monkeypatch.syspath_prepend(tmp_path)
    good = {"class_path": "rewards.brightness.Brightness"}
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"rewards": {"a": good, "b": {"class_path": class_path}}}))
    with pytest.raises(ValueError, match=complaint):
        named_rewards(tmp_path / "a.yaml")


def test_a_config_without_rewards_is_an_error(tmp_path):
    (tmp_path / "a.yaml").write_text("trainer: {max_epochs: 1}\n")
    with pytest.raises(ValueError, match="names no reward"):
        named_rewards(tmp_path / "a.yaml")


def test_the_module_runs_as_a_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["check", "--reward", "rewards.brightness.Brightness", "--reads", "text"])
    with pytest.warns(RuntimeWarning, match="found in sys.modules"), pytest.raises(SystemExit) as exit:
        runpy.run_module("rewards.check", run_name="__main__")
    assert exit.value.code == 1
    assert "REFUSED prompts" in capsys.readouterr().out

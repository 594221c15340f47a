import pytest
import torch
from torchvision.transforms.functional import gaussian_blur

from datamodules import shapes_world
from rewards.geneval_rules import parse
from rewards.shapes import ShapesReward, color_coverage, crispness, judge_shapes
from rewards.shapes_detector import BACKGROUND, COLORS, segment

RED_CIRCLE = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}], "prompt": "a red circle"}


@pytest.fixture(scope="module")
def scenes():
    """96 rendered scenes of all categories and their metadata."""
    generator = torch.Generator().manual_seed(3)
    rows = shapes_world.split_prompts()[1]
    metadata = [rows[i % len(rows)] for i in range(96)]
    return metadata, torch.stack([shapes_world.render(row, generator) for row in metadata])


def dense(images, metadata):
    return ShapesReward("dense")(images, [row["prompt"] for row in metadata], metadata)


def blank(n):
    return torch.tensor(BACKGROUND).view(1, 3, 1, 1).repeat(n, 1, 32, 32)


def painted(metadata, rows, columns):
    """A region of a colour that each prompt would like."""
    images = blank(len(metadata))
    for image, row in zip(images, metadata, strict=True):
        named = [entry["color"] for entry in row["include"] if "color" in entry]
        image[:, rows, columns] = torch.tensor(COLORS[named[0] if named else "red"]).view(3, 1, 1)
    return images


# -- the rules' modes -------------------------------------------------------------------------------------------------


def test_modes_are_the_rules_verdicts(scenes):
    metadata, images = scenes
    wrong = images.roll(1, 0)
    verdicts = judge_shapes(wrong, metadata)
    prompts = [row["prompt"] for row in metadata]
    assert ShapesReward("soft")(wrong, prompts, metadata).tolist() == [v.soft_score for v in verdicts]
    assert ShapesReward("strict")(wrong, prompts, metadata).tolist() == [float(v.strict_correct) for v in verdicts]
    assert ShapesReward("correct")(wrong, prompts, metadata).tolist() == [float(v.correct) for v in verdicts]
    assert 0 < sum(v.correct for v in verdicts) < len(verdicts)


def test_right_scenes_score_one(scenes):
    metadata, images = scenes
    for mode in ("soft", "strict", "correct"):
        scores = ShapesReward(mode)(images, [""] * len(images), metadata)
        assert scores.mean() > 0.97


# -- the dense mode ---------------------------------------------------------------------------------------------------


def test_dense_is_its_stated_mixture(scenes):
    metadata, images = scenes
    worse = gaussian_blur(images.roll(1, 0), [5, 5], [0.7, 0.7])
    seg, wanted = segment(worse), [parse(row) for row in metadata]
    soft = ShapesReward("soft")(worse, [""] * len(worse), metadata).clamp(0, 1)
    expected = 0.25 * crispness(worse, seg, wanted) + 0.25 * color_coverage(seg, wanted) + 0.5 * soft.numpy()
    torch.testing.assert_close(dense(worse, metadata), torch.from_numpy(expected))


def test_dense_stays_in_the_unit_interval(scenes):
    metadata, images = scenes
    torch.manual_seed(0)
    for x in (images, images.roll(1, 0), torch.rand_like(images), torch.zeros_like(images), torch.ones_like(images)):
        scores = dense(x, metadata)
        assert scores.min() >= 0
        assert scores.max() <= 1


def test_dense_orders_blank_blob_wrong_and_right_in_every_category(scenes):
    metadata, images = scenes
    wrong = images.flip(0)
    blob = painted(metadata, slice(4, 28), slice(4, 28))
    scores = [dense(x, metadata) for x in (blank(len(images)), blob, wrong, images)]
    assert (scores[0] == 0).all()
    for tag in shapes_world.TAGS:
        rows = [i for i, row in enumerate(metadata) if row["tag"] == tag]
        means = [score[rows].mean().item() for score in scores]
        assert means == sorted(means), tag
        assert means[1] < 0.25, tag
        assert means[3] > 0.9, tag
    assert (scores[3] > scores[1] + 0.5).all()


def test_nothing_is_to_be_had_for_floods_stripes_specks_and_noise(scenes):
    metadata, images = scenes
    torch.manual_seed(0)
    everything, stripe, speck = slice(None), slice(8, 12), slice(8, 10)
    for x in (
        painted(metadata, everything, everything),
        painted(metadata, everything, stripe),
        painted(metadata, speck, speck),
        torch.rand_like(images),
    ):
        assert dense(x, metadata).max() < 0.15


def test_a_gradual_blur_gradually_lowers_dense(scenes):
    metadata, images = scenes
    means = [dense(images, metadata).mean().item()]
    for sigma in (0.4, 0.7, 1.0, 1.5, 2.0, 3.0):
        means.append(dense(gaussian_blur(images, [9, 9], [sigma, sigma]), metadata).mean().item())
    assert means == sorted(means, reverse=True)
    assert means[0] - means[-1] > 0.4


def test_gradual_noise_gradually_lowers_dense(scenes):
    metadata, images = scenes
    noise = torch.randn(images.shape, generator=torch.Generator().manual_seed(0))
    means = [dense((images + s * noise).clamp(0, 1), metadata).mean().item() for s in (0, 0.03, 0.06, 0.1, 0.2, 0.4)]
    assert means == sorted(means, reverse=True)
    assert means[-1] < 0.1


def test_dense_tells_apart_what_the_rules_score_alike():
    """No circle in either image, but one of them has a clean red object: half the way."""
    square = blank(1)
    square[:, :, 8:18, 8:18] = torch.tensor(COLORS["red"]).view(1, 3, 1, 1)
    blue = blank(1)
    blue[:, :, 8:18, 8:18] = torch.tensor(COLORS["blue"]).view(1, 3, 1, 1)
    soft = [ShapesReward("soft")(x, [""], [RED_CIRCLE]).item() for x in (square, blue)]
    assert soft == [0.0, 0.0]
    assert dense(blank(1), [RED_CIRCLE]) < dense(blue, [RED_CIRCLE]) < dense(square, [RED_CIRCLE])
    assert dense(square, [RED_CIRCLE]).item() == pytest.approx(0.5, abs=1e-6)  # crisp 1, coverage 1, rules 0


def test_coverage_by_hand():
    image = blank(1)
    image[:, :, 2:12, 2:12] = torch.tensor(COLORS["red"]).view(1, 3, 1, 1)  # 100 pixels
    image[:, :, 20:25, 20:30] = torch.tensor(COLORS["blue"]).view(1, 3, 1, 1)  # 50 pixels
    seg = segment(image)

    def coverage(*include):
        return color_coverage(seg, [parse({"include": list(include)})]).item()

    red, blue = ({"class": "circle", "count": 1, "color": color} for color in ("red", "blue"))
    assert coverage({"class": "circle", "count": 2}) == pytest.approx(1.0)
    assert coverage(red) == pytest.approx(100 / 150)  # a third of the paint has no wanted colour
    assert coverage(red, blue) == pytest.approx(1.0)
    assert coverage(red | {"color": "green"}) == 0.0
    assert coverage(red | {"count": 5}) == pytest.approx(100 / 150 * 100 / (5 * 30))
    assert coverage(red, {"class": "ring", "count": 1}) == pytest.approx(1.0)  # the other colour is free


def test_scores_do_not_depend_on_the_batch(scenes):
    metadata, images = scenes
    together = dense(images[:6], metadata[:6])
    alone = torch.cat([dense(images[i : i + 1], metadata[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-6)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"prompt": "a cat"}, "use prompts with GenEval metadata"),
        ({"include": [{"class": "cow", "count": 1}]}, "'cow' is not of the shapes world"),
        ({"include": [{"class": "circle", "count": 1, "color": "pink"}]}, "'pink' is not of the shapes world"),
    ],
)
@pytest.mark.parametrize("mode", ["soft", "dense"])
def test_unusable_metadata(metadata, message, mode):
    with pytest.raises(ValueError, match=message):
        ShapesReward(mode)(blank(1), [""], [metadata])


def test_unknown_mode():
    with pytest.raises(ValueError, match="mode 'hard'"):
        ShapesReward("hard")  # type: ignore[arg-type]


def test_video_is_refused():
    with pytest.raises(ValueError, match="square images"):
        ShapesReward("soft")(torch.zeros(1, 3, 2, 32, 32), [""], [RED_CIRCLE])

from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from rewards.ocr import OCR, find_target, normalise, quoted, similarity

FONTS = Path(matplotlib.get_data_path(), "fonts/ttf")
CASES = [(24, -12), *((size, angle) for size in (18, 32) for angle in (0, -12, 25, 180))]
SIDE = 736
"""What the engine scales smaller images up to, in pixels."""


def letters(text, font, size, angle, side):
    """``side`` x ``side``, white on black, turned about the centre."""
    canvas = Image.new("L", (side, side), 0)
    face = ImageFont.truetype(str(FONTS / f"{font}.ttf"), size)
    ImageDraw.Draw(canvas).text((side / 2, side / 2), text, font=face, fill=255, anchor="mm", align="center")
    return canvas.rotate(angle, resample=Image.Resampling.BICUBIC)


def painted(mask):
    """``[3, H, W]``: dark letters on a pale ground."""
    canvas = Image.new("RGB", mask.size, (236, 232, 220))
    canvas.paste((30, 30, 60), (0, 0), mask)
    return torch.from_numpy(np.array(canvas)).permute(2, 0, 1).float() / 255


def render(text, font="DejaVuSans", size=36, angle=0, side=320):
    return painted(letters(text, font, size, angle, side))


@pytest.mark.parametrize("font", ["DejaVuSans", "DejaVuSerif", "DejaVuSansMono"])
def test_rendered_text_is_read_in_every_font_size_and_rotation(ocr, font):
    """All of a font's in one image: the engine takes as long for a small one."""
    cases = [(f"Quiet Zone {number}", size, angle) for number, (size, angle) in enumerate(CASES, start=24)]
    mask = Image.new("L", (SIDE, SIDE), 0)
    for k, (text, size, angle) in enumerate(cases):
        x, y = SIDE // 3 * (k % 3), SIDE // 3 * (k // 3)
        mask.paste(letters(text, font, size, angle, SIDE // 3), (x, y))
    (read,) = ocr.read(painted(mask)[None])
    assert [similarity(read, text) for text, _, _ in cases] == [1.0] * len(cases)
    assert len(normalise(read)) == sum(len(normalise(text)) for text, _, _ in cases)  # and nothing else
    assert max(similarity(text, "Fresh Tomato Soup") for text, _, _ in cases) < 0.4
    assert similarity(read, "Fresh Tomato Soup") < 0.4


def test_scores_follow_the_prompt(ocr):
    images = torch.stack(
        [render("Open Late"), render("Open Late"), render("Two\nLines"), torch.full((3, 320, 320), 0.5)]
    )
    prompts = [
        'A door with "Open Late" on it',
        'A door with "Harbour View" on it',
        "A card that says “two lines”",
        '"Hi"',
    ]
    scores = ocr(images, prompts, [{}] * 4)
    assert scores[0] > 0.9 and scores[2] > 0.9
    assert scores[1] < 0.4 and scores[3] == 0.0


def test_metadata_wins_over_the_prompt_and_accents_and_chinese_are_read(ocr):
    images = torch.stack([render("Café Olé"), render("STRASSE")])
    scores = ocr(images, ['a sign "Nothing"', "no quotes"], [{"text": "café olé"}, {"text": "Straße"}])
    assert scores.tolist() == [1.0, 1.0]


def test_a_video_scores_the_mean_over_every_fourth_frame(ocr):
    frames = [render("Nothing")] * 6
    frames[0] = render("Exit")  # frames 0 and 4 are read
    video = torch.stack(frames, dim=1)[None]
    image_score = ocr(render("Nothing")[None], ['"Exit"'], [{}])
    assert ocr(video, ['"Exit"'], [{}]).item() == pytest.approx((1.0 + image_score.item()) / 2)


def test_a_prompt_without_a_target_is_refused_before_anything_is_read(monkeypatch):
    reward = OCR()
    monkeypatch.setattr(reward, "read", lambda images: pytest.fail("read"))
    with pytest.raises(
        ValueError, match=r"'a plain door' quotes no text and its metadata has no 'text' \(keys: \['tag'\]"
    ):
        reward(torch.zeros(2, 3, 8, 8), ['a "door"', "a plain door"], [{}, {"tag": "x"}])


def test_tiny_and_blank_images_score_zero(ocr):
    assert ocr(torch.rand(1, 3, 8, 8), ['"word"'], [{}]).item() == 0.0
    assert ocr(torch.ones(1, 3, 16, 40), ['"word"'], [{}]).item() == 0.0


def test_identity_names_the_engine_and_its_models():
    identity = OCR(target_key="words").identity()
    assert identity["name"] == "ocr_rapid" and identity["target_key"] == "words"
    assert len(identity["models"]) >= 3  # detection, direction, recognition
    assert all(name.endswith(".onnx") and len(digest) == 64 for name, digest in identity["models"].items())


def test_an_installation_without_models_says_so(monkeypatch):
    monkeypatch.setattr("rewards.ocr._models", list)
    with pytest.raises(ValueError, match=r"holds no models\); run `pip install --force-reinstall rapidocr"):
        OCR().load()


def test_threads_are_checked():
    with pytest.raises(ValueError, match="threads=0"):
        OCR(threads=0)


@pytest.mark.parametrize(
    ("read", "target", "score"),
    [
        ("open", "open", 1.0),
        ("we are Open now", "OPEN", 1.0),  # a substring, whatever its case
        ("opem", "open", 0.75),  # one substitution of four letters
        ("op", "open", 0.5),
        ("", "open", 0.0),
        ("something else entirely", "open", 0.0),  # the distance is capped at the target's length
        ("O P E N", "open", 1.0),
        ("ＯＰＥＮ", "open", 1.0),  # full width
        ("cafe\u0301", "CAFÉ", 1.0),  # decomposed
        ("ﬁne", "FINE", 1.0),  # ligature
        ("Don't", "don’t", 1.0),
        ("Mon-Fri", "Mon–Fri", 1.0),
        ("Straße", "STRASSE", 1.0),
        ("ΣΟΦΟΣ", "σοφος", 1.0),  # a final sigma
        ("你好世界", "你好", 1.0),
        ("ﾃｽﾄ", "テスト", 1.0),  # half-width kana
        ("zero\u200bwidth", "zerowidth", 1.0),
    ],
)
def test_similarity_by_hand(read, target, score):
    assert similarity(read, target) == pytest.approx(score)


@pytest.mark.parametrize("text", ["Ａ b\u00a0c\u3000D", "İstanbul", "ǅ", "…½ Å"])
def test_normalising_twice_changes_nothing(text):
    assert normalise(normalise(text)) == normalise(text) != ""


@pytest.mark.parametrize(
    ("prompt", "target"),
    [
        ('A runway with "Spring Collection 2024" on the backdrop', "Spring Collection 2024"),
        ('A sign "First" above a sign "Second"', "First"),
        ("A door that reads “Staff Only”.", "Staff Only"),
        ("Ein Schild „Kein Zutritt“ am Tor", "Kein Zutritt"),
        ("Tabliczka „Wstęp wolny” na drzwiach", "Wstęp wolny"),
        ("En skylt med ”Öppet” på", "Öppet"),
        ("Une affiche « Bonne Année »", " Bonne Année "),
        ("Et skilt med »Lukket« på", "Lukket"),
        ("写着「营业中」的招牌", "营业中"),
        ("『本日休業』の看板", "本日休業"),
        ("A baker's sign that says 'Hot Bread' in chalk", "Hot Bread"),
        ("A baker’s sign that says ‘Don’t Wait’ in chalk", "Don’t Wait"),
        ('An empty "" pair, then "Full"', "Full"),
        ("A baker's dozen isn't quoted", None),
        ('A 5" nail', None),
        ('Only "  " spaces', None),
    ],
)
def test_the_first_quoted_span(prompt, target):
    assert quoted(prompt) == target


@pytest.mark.parametrize("target", ["", "  ", 7, None])
def test_a_target_that_is_no_text_is_refused(target):
    with pytest.raises(ValueError, match="expected a string with visible characters|quotes no text"):
        find_target("no quotes", {"text": target}, "text")

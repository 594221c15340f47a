import numpy as np
import pytest
from PIL import Image

from callbacks import ranking_image
from callbacks.ranking_image import draw_ranking


@pytest.fixture
def shown(monkeypatch, tmp_path):
    """What the shelves hold: ``name -> [(prompt, score, grey level)]``."""
    seen = {}

    def look(shelves, title):
        for shelf in shelves:
            seen[shelf.name] = [
                (b.caption, b.scores[0], round(b.images[0, 0, 0, 0].item() * 255)) for b in shelf.blocks
            ]
        return title

    def rank(scores):
        table = [{"index": p, "prompt": f"p{p}", "scores": {"r": row}} for p, row in enumerate(scores)]
        for p, row in enumerate(scores):
            for i in range(len(row)):
                Image.fromarray(np.full((4, 4, 3), (10 * p + i) % 256, np.uint8)).save(tmp_path / f"{p}_{i}.png")
        draw_ranking(table, "r", lambda p, i: tmp_path / f"{p}_{i}.png", "title")
        return seen

    monkeypatch.setattr(ranking_image, "draw_shelves", look)
    return rank


def test_best_median_and_worst_with_their_own_picture_prompt_and_score(shown):
    seen = shown([[float(k)] for k in range(12)])
    assert [score for _, score, _ in seen["best"]] == [11.0, 10.0, 9.0, 8.0]
    assert [prompt for prompt, _, _ in seen["worst"]] == ["p0", "p1", "p2", "p3"]
    assert [prompt for prompt, _, _ in seen["median"]] == ["p6", "p7", "p5", "p8"]
    assert all(grey == 10 * int(prompt[1:]) for shelf in seen.values() for prompt, _, grey in shelf)


def test_prompts_are_different_where_there_are_enough(shown):
    """Prompt 0 has the two best images of all; the second is not shown while another prompt is left."""
    seen = shown([[1.0, 0.99], [0.8, 0.1], [0.7, 0.2], [0.6, 0.3], [0.5, 0.4], [0.45, 0.0]])
    assert seen["best"] == [("p0", 1.0, 0), ("p1", 0.8, 10), ("p2", 0.7, 20), ("p3", 0.6, 30)]
    assert seen["worst"][0] == ("p5", 0.0, 51)


def test_equal_scores_show_no_favourites_and_the_same_ones_each_time(shown):
    first = {k: list(v) for k, v in shown([[0.0]] * 50).items()}
    assert first == shown([[0.0]] * 50)
    assert [prompt for prompt, _, _ in first["best"]] != ["p0", "p1", "p2", "p3"]


@pytest.mark.parametrize(("samples", "each"), [(1, 1), (2, 1), (5, 2), (12, 4), (100, 4)])
def test_few_samples_make_short_shelves(shown, samples, each):
    assert {len(shelf) for shelf in shown([[float(k)] for k in range(samples)]).values()} == {each}

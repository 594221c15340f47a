import math

import numpy as np
import pytest
import torch

from callbacks.estimates import Evaluation, Measure, Tally, difference, estimate
from lightning_modules.types import Rows, Samples


def tally(scores, tags=None, order=None, batch=3):
    """``scores [P, I]`` in batches, in the given order of rows."""
    scores = torch.tensor(scores, dtype=torch.float64)
    rows = [(p, i) for p in range(scores.shape[0]) for i in range(scores.shape[1])]
    rows = [rows[k] for k in order] if order is not None else rows
    result = Tally()
    for start in range(0, len(rows), batch):
        part = rows[start : start + batch]
        prompt, image = torch.tensor(part).unbind(1)
        samples = Samples(
            images=torch.zeros(len(part), 3, 2, 2),
            prompts=tuple(f"p{p}" for p, _ in part),
            metadata=tuple({"tag": tags[p]} if tags else {} for p, _ in part),
            rows=Rows(prompt=prompt, generation=image),
        )
        result.add(samples, {"r": scores[prompt, image]})
    return result.evaluation(iteration=5)


def test_the_standard_error_is_clustered_by_prompt():
    """Prompt means 1, 2, 6: mean 3, variance (4 + 1 + 9) / 2 = 7. Were the images independent it would be smaller."""
    evaluation = tally([[0.0, 2.0], [2.0, 2.0], [5.0, 7.0]])
    result = evaluation.estimate("r")
    assert result.mean == 3.0
    assert result.stderr == pytest.approx(math.sqrt(7 / 3))
    images = np.array([0.0, 2.0, 2.0, 2.0, 5.0, 7.0])
    assert result.stderr > images.std(ddof=1) / math.sqrt(6)
    assert (evaluation.images, evaluation.iteration, evaluation.categories) == ((2, 2, 2), 5, [])


def test_more_copies_of_the_same_images_do_not_shrink_the_error():
    scores = [[0.3], [0.9], [0.4], [0.1]]
    once, often = tally(scores).estimate("r"), tally([row * 50 for row in scores]).estimate("r")
    assert once.stderr == pytest.approx(often.stderr, rel=1e-12)


def test_the_change_is_paired():
    """Differences 0.1, 0.3: mean 0.2, standard deviation sqrt(0.02), stderr 0.1, however hard the prompts are."""
    before, after = tally([[0.0, 0.0], [10.0, 10.0]]), tally([[0.1, 0.1], [10.2, 10.4]])
    change = after.change(before, "r")
    assert change.mean == pytest.approx(0.2)
    assert change.stderr == pytest.approx(0.1)
    assert after.estimate("r").stderr > 5.0


def test_one_prompt_has_no_standard_error():
    assert math.isnan(estimate(torch.tensor([1.0])).stderr)


def test_the_order_and_the_batches_do_not_matter():
    scores = [[0.1, 0.7], [0.4, 0.2], [0.9, 0.3]]
    straight, shuffled = tally(scores), tally(scores, order=[5, 0, 3, 1, 4, 2], batch=2)
    assert straight.comparable(shuffled)
    assert torch.allclose(straight.means["r"], shuffled.means["r"], rtol=0, atol=1e-15)


def test_categories():
    evaluation = tally([[1.0], [3.0], [10.0]], tags=["colors", "colors", "counting"])
    assert evaluation.categories == ["colors", "counting"]
    assert evaluation.estimate("r", "colors").mean == 2.0
    assert evaluation.estimate("r", "colors").stderr == 1.0
    assert evaluation.scalars("val")["val/r/counting"] == 10.0
    assert evaluation.scalars("val")["val/r"] == pytest.approx(14 / 3)
    assert set(evaluation.scalars("val")) == {"val/r", "val/r_stderr", "val/r/colors", "val/r/counting"}


def test_another_set_is_not_comparable():
    base = tally([[1.0], [2.0]])
    assert not base.comparable(tally([[1.0]]))
    assert not base.comparable(tally([[1.0, 1.0], [2.0, 2.0]]))
    assert not base.comparable(tally([[1.0], [2.0]], tags=["a", "b"]))


def test_a_checkpoint_of_plain_values_restores_it(tmp_path):
    evaluation = tally([[0.1, 0.7], [0.4, 0.2]], tags=["a", "b"])
    torch.save(evaluation.state_dict(), tmp_path / "x.pt")
    restored = Evaluation.from_state_dict(torch.load(tmp_path / "x.pt", weights_only=True))
    assert restored.comparable(evaluation)
    assert torch.equal(restored.means["r"], evaluation.means["r"])
    assert restored.iteration == 5


def test_a_balanced_mean_counts_each_category_the_same():
    """Category means 1 (of 0, 2: stderr 1) and 5 (of 4, 5, 6: stderr 1/sqrt 3)."""
    evaluation = tally([[0.0], [2.0], [4.0], [5.0], [6.0]], tags=["a", "a", "b", "b", "b"])
    result = evaluation.measure(Measure(reward="r", balanced=True))
    assert result.mean == 3.0 != evaluation.estimate("r").mean
    assert result.stderr == pytest.approx(math.sqrt(1 + 1 / 3) / 2)
    assert result.freedom == pytest.approx((4 / 3) ** 2 / (1 + (1 / 3) ** 2 / 2))  # Welch, by hand


def test_a_balanced_change_is_paired():
    tags = ["a", "a", "b", "b"]
    before, after = tally([[0.0], [9.0], [3.0], [5.0]], tags), tally([[1.0], [10.0], [3.0], [7.0]], tags)
    change = after.measured_change(before, Measure(reward="r", balanced=True))
    assert change.mean == 1.0  # (1 + 1) / 2 and (0 + 2) / 2
    assert change.stderr == pytest.approx(0.5)  # 0 and 1


def test_intervals_are_students():
    """t(0.975, 2) = 4.3027: a table's value."""
    result = tally([[0.0], [1.0], [2.0]]).estimate("r")
    low, high = result.interval()
    assert (low, high) == pytest.approx((1 - 4.3027 / math.sqrt(3), 1 + 4.3027 / math.sqrt(3)), abs=1e-4)
    assert tally([[1.0], [1.0]]).estimate("r").interval() == (1.0, 1.0)
    assert all(math.isnan(end) for end in tally([[1.0]]).estimate("r").interval())


def test_an_unpaired_difference_is_welchs():
    from scipy.stats import ttest_ind

    one, other = [1.0, 2.0, 4.0, 9.0], [3.0, 3.5, 4.0]
    found = difference(tally([[x] for x in other]).estimate("r"), tally([[x] for x in one]).estimate("r"))
    interval = ttest_ind(other, one, equal_var=False).confidence_interval(0.95)
    assert found.mean == pytest.approx(np.mean(other) - np.mean(one))
    assert found.interval() == pytest.approx((interval.low, interval.high))


def test_a_table_gives_the_evaluation_back():
    collected = Tally("style")
    rows = Rows(prompt=torch.tensor([4, 1, 4]), generation=torch.tensor([1, 0, 0]))
    samples = Samples(
        images=torch.zeros(3, 3, 2, 2), prompts=("x", "y", "x"), metadata=({"style": "s"}, {"tag": "t"}, {"style": "s"}), rows=rows,
    )  # fmt: skip
    collected.add(samples, {"r": torch.tensor([0.25, 1.0, 0.75])})
    table = collected.table()
    assert table == [
        {"index": 1, "prompt": "y", "tag": "", "scores": {"r": [1.0]}},
        {"index": 4, "prompt": "x", "tag": "s", "scores": {"r": [0.75, 0.25]}},
    ]
    again = Evaluation.of(table, 3)
    assert again.comparable(collected.evaluation(3))
    assert again.means["r"].tolist() == [1.0, 0.5]

"""What the books of an iteration make of scores: masks, monitors, drops and the numbers that are logged."""

import pytest
import torch

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.iteration import Iteration, weigh
from lightning_modules.parallel.layout import Layout
from lightning_modules.types import PromptBatch, Rows, Samples, Scores

NAN, INF = float("nan"), float("inf")
PROMPTS = ("a", "b")


def samples(pairs=((0, 0), (0, 1), (1, 0), (1, 1))):
    ids = torch.tensor(pairs)
    rows = Rows(prompt=ids[:, 0], generation=ids[:, 1])
    prompts = tuple(PROMPTS[p] for p in ids[:, 0].tolist())
    return Samples(images=torch.zeros(len(ids), 3, 1, 1), prompts=prompts, metadata=({},) * len(ids), rows=rows)


def scores(values, weights=None, applies=None):
    return Scores(
        values={name: torch.tensor(v, dtype=torch.float64) for name, v in values.items()},
        weights=weights or {},
        applies={name: torch.tensor(mask) for name, mask in (applies or {}).items()},
    )


def books(*parts):
    layout = Layout(prompts=2, generations=2)
    iteration = Iteration(
        PromptBatch(prompts=PROMPTS, metadata=({}, {}), iteration=0), layout=layout, device=torch.device("cpu")
    )
    iteration.record(parts)
    return iteration


def test_weights_and_masks_travel_with_the_values():
    scored = weigh(
        samples(),
        scores(
            {"x": [1.0, 2.0, 3.0, 4.0], "y": [NAN, NAN, 5.0, NAN], "z": [7.0] * 4}, {"x": 2.0, "y": -1.0, "z": 0.0},
            {"y": [False, False, True, True]},
        ),
    )  # fmt: skip
    assert scored.weights == {"x": 2.0, "y": -1.0, "z": 0.0}
    rewards = scored.rewards
    assert rewards.weights == (2.0, -1.0)
    assert rewards.applies.tolist() == [[True, False], [True, False], [True, True], [True, True]]
    assert rewards.total[:3].tolist() == [2.0, 4.0, 1.0]
    assert rewards.valid.tolist() == [True, True, True, False]
    assert rewards.total[3].isnan()


def test_what_is_wrong_with_scores_is_named():
    with pytest.raises(ValueError, match="at least one weighted reward"):
        weigh(samples(), scores({"x": [1.0] * 4}, {"x": 0.0}))
    with pytest.raises(ValueError, match=r"'x' gave scores of shape \(3,\) for 4 samples"):
        weigh(samples(), scores({"x": [1.0] * 3}))
    with pytest.raises(ValueError, match=r"infinite: 1"):
        weigh(samples(), scores({"x": [1.0, INF, 1.0, 1.0]}))
    with pytest.raises(ValueError, match="no weighted reward applies to the prompt 'b'"):
        weigh(samples(), scores({"x": [1.0] * 4, "m": [1.0] * 4}, {"m": 0.0}, {"x": [True, True, False, False]}))
    with pytest.raises(ValueError, match="overflows"):
        weigh(samples(), scores({"x": [1e308] * 4, "y": [1e308] * 4}))


def test_what_is_only_monitored_stops_nothing():
    with pytest.warns(UserWarning, match=r"'m' gave scores of shape \(3,\) for 4 samples.*logged as NaN"):
        scored = weigh(samples(), scores({"x": [1.0] * 4, "m": [1.0] * 3}, {"m": 0.0}))
    assert scored.values["m"].isnan().all()
    with pytest.warns(UserWarning, match="infinite: 1"):
        scored = weigh(samples(), scores({"x": [1.0] * 4, "m": [1.0, INF, 2.0, NAN]}, {"m": 0.0}))
    assert scored.values["m"].isnan().tolist() == [False, True, False, True]
    assert scored.rewards.valid.all()


def test_background_scorers_are_waited_for_and_their_errors_raised():
    late = scores({})
    late.pending.append(lambda: late.values.update(x=torch.arange(4.0)))
    assert weigh(samples(), late).rewards.total.tolist() == [0.0, 1.0, 2.0, 3.0]

    def fail():
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        weigh(samples(), Scores(pending=[fail]))


def test_logged_numbers_by_hand():
    scored = weigh(
        samples(),
        scores(
            {"x": [1.0, 3.0, 5.0, 5.0], "y": [2.0, NAN, 0.0, 0.0], "m": [NAN] * 4, "none": [NAN] * 4},
            {"x": 1.0, "y": 2.0, "m": 0.0, "none": 0.0},
            {"y": [True, True, False, False], "none": [False] * 4},
        ),
    )  # fmt: skip
    iteration = books(scored)
    assert iteration.totals.tolist()[2:] == [5.0, 5.0]
    metrics = iteration.metrics(GroupAdvantage(), [])
    assert metrics["reward"] == pytest.approx((5 + 5 + 5) / 3)  # 1 + 2 * 2, and twice 5; the second sample is dropped
    assert metrics["dropped_samples"] == 1.0
    assert (metrics["reward/x"], metrics["reward/x_group_std"]) == (3.5, 0.5)
    assert metrics["reward/x_dropped_share"] == 0.0
    assert metrics["reward/y"] == 2.0  # of the first prompt alone
    assert metrics["reward/y_dropped_share"] == 0.5
    assert metrics["reward/m"] != metrics["reward/m"]
    assert metrics["reward/m_dropped_share"] == 1.0
    assert metrics["reward/none"] != metrics["reward/none"]  # it judged nothing
    assert metrics["reward/none_dropped_share"] == 0.0


def test_advantages_that_are_logged_have_gdpos_factor():
    scored = weigh(samples(), scores({"x": [0.0, 2.0, 0.0, 4.0], "y": [0.0, 3.0, 9.0, 3.0]}))
    metrics = books(scored).metrics(GroupAdvantage(clip=None, combine="gdpo", eps=1e-12), [])
    assert metrics["advantage/max"] == pytest.approx(2**0.5)  # -2, 2, 0, 0 over their std
    assert metrics["advantage/abs_mean"] == pytest.approx(2**0.5 / 2)
    assert metrics["advantage/zero_groups"] == 0.0


@pytest.mark.parametrize("estimator", [GroupAdvantage(), GroupAdvantage(combine="gdpo", clip=None)])
def test_records_of_several_ranks_are_put_in_order(estimator):
    values = {"x": [1.0, 3.0, 5.0, 9.0], "y": [2.0, 0.0, 0.0, 1.0]}
    whole = books(weigh(samples(), scores(values)))
    pairs = (((0, 1), (1, 1)), ((1, 0), (0, 0)))
    parts = [
        weigh(samples(ids), scores({n: [v[2 * p + g] for p, g in ids] for n, v in values.items()})) for ids in pairs
    ]
    split = books(*parts)
    assert torch.equal(split.totals, whole.totals)
    assert torch.equal(split.advantages(estimator).table, whole.advantages(estimator).table)
    assert split.final_scale(estimator) == whole.final_scale(estimator)
    assert split.advantages(estimator, [1]).groups.keys() == {1}


def test_ranks_that_score_differently_are_refused():
    parts = [weigh(samples(((0, k),)), scores({"x": [1.0]}, {"x": weight})) for k, weight in enumerate((1.0, 2.0))]
    with pytest.raises(ValueError, match="different rewards or weights"):
        books(*parts)


def test_an_iteration_without_any_score_is_an_error():
    iteration = books(weigh(samples(), scores({"x": [NAN] * 4})))
    with pytest.raises(ValueError, match="every sample of iteration 0 was dropped"):
        iteration.final_scale(GroupAdvantage())

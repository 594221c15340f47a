"""Which steps are trained: sizes, draws and the sliding sequence, by hand."""

import pytest
import torch

from lightning_modules.flow.windows import AllButLast, FixedWindow, Fraction, RandomWindow, SlidingWindow, Window
from lightning_modules.types import Rows

T = 10
ids = torch.cartesian_prod(torch.arange(4), torch.arange(6))
ROWS = Rows(prompt=ids[:, 0], generation=ids[:, 1])

WINDOWS = [
    AllButLast(),
    Fraction(0.5),
    Fraction(0.5, draw_per="sample"),
    FixedWindow(2, 3),
    RandomWindow(3, draw_per="prompt"),
    RandomWindow(2, low=4, high=10, draw_per="sample"),
    SlidingWindow(3, stride=2, every=1),
]


def steps(
    window: Window, iteration: int = 0, *, rows: Rows = ROWS, num_steps: int = T, seed: int = 0
) -> list[list[int]]:
    mask = window.trained(num_steps, seed=seed, iteration=iteration, rows=rows)
    assert mask.dtype == torch.bool and mask.shape == (len(rows), num_steps)
    return [row.nonzero().flatten().tolist() for row in mask]


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: type(w).__name__)
def test_every_row_trains_size_candidates(window):
    candidates = set(window.candidates(T).nonzero().flatten().tolist())
    seen = set()
    for iteration in range(100):
        for row in steps(window, iteration):
            assert len(row) == window.size(T) >= 1
            seen |= set(row)
    assert seen == candidates


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: type(w).__name__)
def test_draws_are_reproducible_and_do_not_see_the_batch(window):
    subset = torch.tensor([17, 3, 8])
    assert steps(window, 7, rows=ROWS[subset]) == [steps(window, 7)[i] for i in subset.tolist()]


@pytest.mark.parametrize(
    ("fraction", "num_steps", "size"),
    [(1.0, 10, 9), (0.5, 10, 4), (0.6, 16, 9), (0.58, 51, 29), (0.25, 10, 2), (5 / 9, 10, 5), (0.6, 20, 11)],
)
def test_fraction_counts_trainable_steps(fraction, num_steps, size):
    window = Fraction(fraction)
    assert window.size(num_steps) == size
    assert all(len(row) == size for row in steps(window, num_steps=num_steps))


def groups(window: Window, iteration: int, seed: int = 0) -> list[set[tuple[int, ...]]]:
    """The distinct sets inside each prompt's group."""
    rows = [tuple(row) for row in steps(window, iteration, seed=seed)]
    return [set(rows[6 * b : 6 * b + 6]) for b in range(4)]


@pytest.mark.parametrize("kind", [lambda **k: Fraction(0.5, **k), lambda **k: RandomWindow(1, **k)])
def test_one_draw_per_iteration_prompt_or_sample(kind):
    per_iteration = [groups(kind(draw_per="iteration"), i) for i in range(8)]
    assert all(len(set().union(*g)) == 1 for g in per_iteration)  # one set for all rows ...
    assert len({frozenset(g[0]) for g in per_iteration}) > 1  # ... another one in another iteration

    per_prompt = groups(kind(draw_per="prompt"), 0)
    assert all(len(g) == 1 for g in per_prompt) and len(set().union(*per_prompt)) > 1

    assert all(len(g) > 1 for g in groups(kind(draw_per="sample"), 0))
    assert groups(kind(draw_per="sample"), 0, seed=1) != groups(kind(draw_per="sample"), 0, seed=0)


def test_random_window_is_contiguous_inside_its_bounds():
    window = RandomWindow(3, low=1, high=6, draw_per="sample")
    starts = {row[0] for i in range(20) for row in steps(window, i) if row == list(range(row[0], row[0] + 3))}
    assert starts == {1, 2, 3}
    assert window.candidates(T).nonzero().flatten().tolist() == [1, 2, 3, 4, 5]


def test_fixed_window_by_hand():
    assert steps(FixedWindow(2, 3)) == [[2, 3, 4]] * len(ROWS)
    assert steps(FixedWindow(8, 2)) == [[8, 9]] * len(ROWS)  # the last step, named explicitly


def test_sliding_window_by_hand():
    window = SlidingWindow(4, every=2)  # positions 0..5 inside [0, 9), two iterations each, then from the start
    starts = [steps(window, i)[0] for i in range(16)]
    assert starts == [list(range(s, s + 4)) for s in (0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 0, 0, 1, 1)]

    strided = SlidingWindow(2, stride=3, every=1, low=1, high=8)  # 1, 4 fit; 7 would leave [1, 8)
    assert [steps(strided, i)[0] for i in range(4)] == [[1, 2], [4, 5], [1, 2], [4, 5]]
    assert strided.candidates(T).nonzero().flatten().tolist() == [1, 2, 4, 5]


@pytest.mark.parametrize(("choice", "expected"), [("trained", [8]), ("all_but_last", range(9)), ("all", range(10))])
def test_stochastic_steps(choice, expected):
    window = FixedWindow(8, 1, stochastic=choice)
    trained = window.trained(T, seed=0, iteration=0, rows=ROWS)
    stochastic = window.stochastic(trained)
    assert [row.nonzero().flatten().tolist() for row in stochastic] == [list(expected)] * len(ROWS)


@pytest.mark.parametrize("choice", ["trained", "all_but_last", "all"])
def test_trained_steps_are_always_stochastic(choice):
    window = RandomWindow(2, low=7, high=10, draw_per="sample", stochastic=choice)  # the last step included
    trained = window.trained(T, seed=0, iteration=0, rows=ROWS)
    assert bool(trained[:, -1].any()) and bool(window.stochastic(trained)[trained].all())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Fraction(0.0), "fraction = 0.0"),
        (lambda: Fraction(1.5), "fraction = 1.5"),
        (lambda: Fraction(0.1).size(10), "raise the fraction"),
        (lambda: Fraction(0.1).candidates(10), "raise the fraction"),
        (lambda: Fraction(0.5, draw_per="batch"), "draw_per = 'batch'"),  # pyright: ignore[reportArgumentType]
        (lambda: AllButLast().candidates(1), "num_steps = 1"),
        (lambda: AllButLast(stochastic="some"), "stochastic = 'some'"),  # pyright: ignore[reportArgumentType]
        (lambda: FixedWindow(0, 0), "size = 0"),
        (lambda: FixedWindow(-1, 2), "step -1"),
        (lambda: FixedWindow(8, 3).size(10), "does not fit a grid of 10 steps"),
        (lambda: RandomWindow(3, low=4, high=6), "does not fit into steps"),
        (lambda: RandomWindow(10).candidates(10), "does not fit a grid"),
        (lambda: RandomWindow(2, high=12).size(10), "does not fit a grid"),
        (lambda: SlidingWindow(2, stride=0), "stride = 0"),
        (lambda: SlidingWindow(2, every=0), "every = 0"),
        (lambda: SlidingWindow(10).trained(10, seed=0, iteration=0, rows=ROWS), "does not fit a grid"),
    ],
)
def test_invalid_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""Every (prompt, generation) pair is made once, by a known rank, in few waves."""

import itertools

import pytest

from lightning_modules.parallel.layout import Layout

KINDS = ("shared", "per_rank")
SIZES = list(itertools.product((1, 2, 3, 5), (2, 3, 4, 8, 12), (1, 2, 3, 4, 8, 32)))
"""(B, M, R); a failing assertion names the layout."""


def layouts(kinds=KINDS):
    for (prompts, generations, ranks), kind in itertools.product(SIZES, kinds):
        yield Layout(prompts=prompts, generations=generations, ranks=ranks, kind=kind)


def pairs(layout, start, stop, rank):
    rows = layout.rows(start, stop, rank)
    return list(zip(rows.prompt.tolist(), rows.generation.tolist(), strict=True))


def everything(layout):
    return [pair for rank in range(layout.ranks) for pair in pairs(layout, 0, layout.waves, rank)]


def made_until(layout, stop, start=0):
    """By all ranks in these waves."""
    slots = (layout.slot(wave, rank) for wave in range(start, stop) for rank in range(layout.ranks))
    return {slot for slot in slots if slot is not None}


def test_every_generation_is_made_exactly_once():
    for layout in layouts():
        pairs_wanted = list(itertools.product(range(layout.prompts), range(layout.generations)))
        assert sorted(everything(layout)) == pairs_wanted, layout
        assert layout.idle_slots == layout.waves * layout.ranks - layout.prompts * layout.generations, layout


def test_shared_idles_fewer_slots_than_there_are_ranks():
    for layout in layouts(kinds=("shared",)):
        assert 0 <= layout.idle_slots < layout.ranks, layout
        shares = [len(pairs(layout, 0, layout.waves, rank)) for rank in range(layout.ranks)]
        assert max(shares) - min(shares) <= 1, layout


@pytest.mark.parametrize(("generations", "ranks"), [(8, 2), (8, 4), (4, 4), (12, 3)])
def test_where_ranks_divide_the_group_round_q_of_rank_r_is_generation_q_ranks_plus_r(generations, ranks):
    layout = Layout(prompts=2, generations=generations, ranks=ranks)
    rounds = generations // ranks
    for prompt, q, rank in itertools.product(range(2), range(rounds), range(ranks)):
        assert layout.slot(prompt * rounds + q, rank) == (prompt, q * ranks + rank)
    assert layout.idle_slots == 0


@pytest.mark.parametrize(("generations", "ranks"), [(2, 4), (2, 8), (4, 32)])
def test_where_the_group_divides_the_ranks_worker_groups_take_different_prompts(generations, ranks):
    groups = ranks // generations
    layout = Layout(prompts=2 * groups, generations=generations, ranks=ranks)
    for wave, rank in itertools.product(range(2), range(ranks)):
        assert layout.slot(wave, rank) == (wave * groups + rank // generations, rank % generations)


def test_the_paper_s_uneven_cases_idle_less_than_prompt_by_prompt_rounds():
    for generations, ranks, per_prompt in [(12, 8, 0.25), (24, 32, 0.25), (5, 4, 0.375)]:
        layout = Layout(prompts=24, generations=generations, ranks=ranks)
        rounds = -(-generations // ranks)
        assert 1 - generations / (rounds * ranks) == pytest.approx(per_prompt)
        assert layout.idle_slots / (layout.waves * ranks) < 0.01


def test_hand_worked_shares_of_two_ranks():
    layout = Layout(prompts=2, generations=3, ranks=2)
    assert pairs(layout, 0, 3, 0) == [(0, 0), (0, 2), (1, 1)]
    assert pairs(layout, 0, 3, 1) == [(0, 1), (1, 0), (1, 2)]
    chunks = layout.chunks()
    assert [chunk.closed for chunk in chunks] == [(0,), (1,)]
    assert [[(r.start, r.stop, r.closes) for r in chunk.rounds] for chunk in chunks] == [
        [(0, 1, 2), (1, 2, 3)],  # wave 1 begins group 1 on rank 1: a round of its own, backpropagated with group 1
        [(2, 3, 3)],
    ]


@pytest.mark.parametrize("micro_batch", [None, 1, 2, 3])
def test_chunks_cover_the_waves_and_close_each_group_once_it_is_complete(micro_batch):
    for layout, groups_in_flight in itertools.product(layouts(), (1, 2)):
        chunks = layout.chunks(groups_in_flight, micro_batch)
        rounds = [r for chunk in chunks for r in chunk.rounds]
        assert [w for r in rounds for w in range(r.start, r.stop)] == list(range(layout.waves)), layout
        assert sorted(p for chunk in chunks for p in chunk.closed) == list(range(layout.prompts)), layout
        for chunk in chunks:
            made = made_until(layout, chunk.stop)
            for prompt in chunk.closed:
                assert {(prompt, m) for m in range(layout.generations)} <= made, (layout, prompt)
            for r in chunk.rounds:
                assert r.stop <= chunk.stop <= layout.waves, (layout, r)
                members, done = made_until(layout, r.stop, r.start), made_until(layout, r.closes)
                assert {(p, m) for p, _ in members for m in range(layout.generations)} <= done, (layout, r)
                assert micro_batch is None or r.stop - r.start <= micro_batch, (layout, r)


@pytest.mark.parametrize(("prompts", "generations", "ranks"), [(3, 8, 2), (2, 8, 4), (4, 2, 4), (8, 2, 8), (5, 2, 4)])
def test_the_number_of_chunks_is_that_of_waves_of_groups(prompts, generations, ranks):
    chunks = Layout(prompts=prompts, generations=generations, ranks=ranks).chunks()
    at_once = max(1, ranks // generations)
    assert len(chunks) == -(-prompts // at_once)


def test_one_rank_rolls_out_group_by_group():
    layout = Layout(prompts=3, generations=4)
    chunks = layout.chunks(groups_in_flight=2, micro_batch=3)
    assert [(r.start, r.stop) for r in chunks[0].rounds] == [(0, 3), (3, 6), (6, 8)]
    assert [(r.start, r.stop) for r in chunks[1].rounds] == [(8, 11), (11, 12)]
    assert [chunk.closed for chunk in chunks] == [(0, 1), (2,)]


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"prompts": 0}, "prompts=0"),
        ({"ranks": 0}, "ranks=0"),
        ({"generations": 0}, "generations=0"),
        ({"kind": "x"}, "'x'"),
    ],
)
def test_impossible_layouts_are_refused(options, named):
    with pytest.raises(ValueError, match=named):
        Layout(**({"prompts": 1, "generations": 2, "ranks": 1} | options))


@pytest.mark.parametrize("kind", ["shared", "per_rank"])
@pytest.mark.parametrize(("prompts", "generations", "ranks"), [(3, 4, 1), (3, 3, 2), (2, 8, 4), (5, 2, 4)])
def test_a_chunk_for_every_round(prompts, generations, ranks, kind):
    layout = Layout(prompts=prompts, generations=generations, ranks=ranks, kind=kind)
    for options in ({"micro_batch": 1}, {"micro_batch": 2, "groups_in_flight": 2}, {}):
        apart, chunks = layout.chunks(**options, every_round=True), layout.chunks(**options)
        assert [chunk.rounds for chunk in apart] == [(part,) for chunk in chunks for part in chunk.rounds]
        assert sorted(p for chunk in apart for p in chunk.closed) == list(range(prompts))  # each group closes once
        for chunk in apart:
            (part,) = chunk.rounds
            assert chunk.stop == part.stop
            assert all(part.start < layout.closing(p) <= part.stop for p in chunk.closed)

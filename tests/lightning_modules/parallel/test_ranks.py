"""Small things told between processes, in order, with bounded waits and the culprit by name."""

import os
import time

import pytest
import torch
import torch.distributed as dist

from lightning_modules.parallel import ranks as ranks_module
from lightning_modules.parallel.ranks import Ranks
from tests.ranks import RankError, pool

SLOW = 2
"""The rank that comes late."""


def test_alone_everything_is_local():
    ranks = Ranks.alone()
    assert (ranks.rank, ranks.size) == (0, 1)
    assert ranks.gather({"a": 1}) == [{"a": 1}]
    assert ranks.share(lambda: 3, "counting") == [3]
    with pytest.raises(ZeroDivisionError):
        ranks.share(lambda: 1 // 0, "dividing")
    ranks.check_same("anything", object())
    ranks.close()
    assert not dist.is_initialized()


def test_connecting_needs_processes():
    with pytest.raises(RuntimeError, match="no process group: start the processes by the trainer, torchrun or SLURM"):
        Ranks.connected(1)


def exchange():
    ranks = Ranks.connected(20)
    values = ranks.gather({"rank": ranks.rank, "ids": [(ranks.rank, k) for k in range(ranks.rank)]})
    shared = ranks.share(lambda: 10 * ranks.rank, "multiplying")
    ranks.check_same("the constant", (3, "x", 0.5))
    ranks.close()
    return (ranks.rank, ranks.size), values, shared


@pytest.mark.parametrize("size", [2, 4])
def test_values_arrive_in_the_order_of_the_ranks(size):
    wanted = [{"rank": r, "ids": [(r, k) for k in range(r)]} for r in range(size)]
    for rank, (place, values, shared) in enumerate(pool(size).run(exchange)):
        assert place == (rank, size)
        assert values == wanted
        assert shared == [10 * r for r in range(size)]


class Broken(Exception):
    pass


def fail_on(culprits):
    """What each rank saw of the failure, and whether it can go on afterwards."""
    ranks = Ranks.connected(20)

    def work():
        if ranks.rank in culprits:
            raise Broken(f"score {ranks.rank}")
        return ranks.rank

    try:
        seen = ranks.share(work, "scoring")
    except Exception as error:
        seen = type(error).__name__, str(error)
    after = ranks.gather(ranks.rank)
    ranks.close()
    return seen, after


def test_a_failure_on_one_rank_ends_the_work_of_all():
    for rank, (seen, after) in enumerate(pool(4).run(fail_on, (1,))):
        if rank == 1:
            assert seen == ("Broken", "score 1")
        else:
            assert seen == ("RuntimeError", "rank 1 failed in scoring: Broken: score 1")
        assert after == [0, 1, 2, 3]


def test_failures_on_two_ranks_are_their_own():
    seen = [seen for seen, _ in pool(4).run(fail_on, (1, 3))]
    assert seen[1] == ("Broken", "score 1") and seen[3] == ("Broken", "score 3")
    assert seen[0] == seen[2] == ("RuntimeError", "rank 1 failed in scoring: Broken: score 1")


def compare(values):
    ranks = Ranks.connected(20)
    try:
        ranks.check_same("the sigma grid", values[ranks.rank])
        return None
    except ValueError as error:
        return str(error)
    finally:
        ranks.close()


def test_what_differs_and_where_is_said_on_every_rank():
    grid = torch.linspace(1, 0, 200).tolist()
    other = [*grid[:150], grid[150] + 1e-7, *grid[151:]]
    messages = pool(4).run(compare, [grid, grid, other, other])
    assert len(set(messages)) == 1
    assert messages[0].startswith("the sigma grid is not the same on all ranks: ")
    assert "on rank 0" in messages[0] and "on rank(s) [2, 3]" in messages[0]
    assert repr(grid[150]) in messages[0] and repr(other[150]) in messages[0]  # where they part, not how they begin
    assert pool(4).run(compare, [grid] * 4) == [None] * 4


def meet(place_of_last, late):
    """(message, seconds) of the error on each rank."""
    ranks = Ranks.connected(1.0)
    last = ranks.rank == ranks.size - 1
    start = time.monotonic()
    if late and ranks.rank == SLOW:
        time.sleep(2.5)
        ranks.close()
        return None, 0.0
    try:
        ranks.gather(0, place_of_last if last else "the rewards")
    except RuntimeError as error:
        return str(error), time.monotonic() - start
    finally:
        ranks.close()
    return None, 0.0


def test_a_rank_that_does_not_arrive_is_named_in_time():
    outcomes = pool(4).run(meet, "the rewards", True)
    for rank in set(range(4)) - {SLOW}:
        message, seconds = outcomes[rank]
        assert "not every rank arrived at the rewards within 1 s" in message
        assert seconds < 2.5
    assert f"Ranks {SLOW} failed" in outcomes[0][0]
    assert all("rank 0" in outcomes[rank][0] for rank in (1, 3))  # it is the one that knows


def test_ranks_that_meet_at_different_places_are_told_so():
    outcomes = pool(4).run(meet, "the norm", False)
    assert all("rank 3 at the norm" in message for message, _ in outcomes[:3])
    assert "rank 3 is at the norm, but rank 0 at the rewards" in outcomes[3][0]


def groups_kept():
    def count():
        return len(dist.distributed_c10d._world.pg_map)

    before = count()
    objects = [Ranks.connected(20) for _ in range(3)]
    during = count()
    for ranks in objects:
        ranks.gather(1)
        ranks.close()
        ranks.close()  # once more does nothing
    return during - before, count() - before


def test_closed_objects_leave_no_groups_behind():
    assert pool(2).run(groups_kept) == [(3, 0)] * 2


def vanish(culprit):
    ranks = Ranks.connected(1.5)
    ranks.gather(0)
    if ranks.rank == culprit:
        os._exit(9)
    ranks.gather(0, "the rewards")


@pytest.mark.parametrize("culprit", [0, 2])
def test_a_rank_that_dies_does_not_keep_the_others_waiting(culprit):
    """Nor does it if what it held up is noticed by the first rank alone, which tells the others by leaving."""
    pool(4).run(exchange)  # started
    start = time.monotonic()
    with pytest.raises(RankError, match=rf"rank {culprit}:\ndied \(exit code 9\)") as caught:
        pool(4).run(vanish, culprit)
    assert time.monotonic() - start < 8
    assert str(caught.value).count("not every rank arrived at the rewards") == 3


def fail_where_nobody_hears(grace):
    """The last rank fails while the others are busy, and does not wait for them as long as they would for it."""
    ranks_module.GRACE, before = grace, ranks_module.GRACE
    ranks = Ranks.connected(20)
    start = time.monotonic()
    try:
        if ranks.rank < ranks.size - 1:
            time.sleep(grace + 1.5)
        else:
            ranks.share(lambda: 1 // 0, "scoring")
    except ZeroDivisionError:
        return time.monotonic() - start
    finally:
        ranks_module.GRACE = before
        ranks.close()


def test_a_rank_that_failed_raises_its_own_error_soon_though_nobody_comes():
    *_, seconds = pool(2).run(fail_where_nobody_hears, 0.5)
    assert 0.4 < seconds < 1.9

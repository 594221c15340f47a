"""How Reweight chooses to hold gradients, decided before any work is done."""

import pytest
import torch

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.schedules.reweight import Reweight
from tests.harness import Update
from tests.tiny import TinyPolicy


def bound(storage, advantage, generations=4):
    schedule = Reweight(storage)
    schedule.bind(Update(TinyPolicy(), torch.zeros(1, generations), advantage=advantage).context())
    return schedule


@pytest.mark.parametrize(
    ("storage", "advantage", "generations", "streaming"),
    [
        ("auto", GroupAdvantage(clip=5.0), 4, True),  # a clip at 5 cannot fire for 26 or fewer
        ("auto", GroupAdvantage(clip=5.0), 32, False),
        ("auto", GroupAdvantage(clip=None, std="global"), 32, True),
        ("auto", GroupAdvantage(clip=5.0, std="global"), 4, False),
        ("per_sample", GroupAdvantage(clip=None), 4, False),
        ("streaming", GroupAdvantage(clip=None), 64, True),
    ],
)
def test_storage_is_decided_from_the_configuration(storage, advantage, generations, streaming):
    assert bound(storage, advantage, generations).wants_rewards_early == streaming


@pytest.mark.parametrize(
    "advantage", [GroupAdvantage(clip=5.0), GroupAdvantage(std="global"), GroupAdvantage(std="none")]
)
def test_streaming_is_refused_where_it_is_not_exact(advantage):
    with pytest.raises(ValueError, match=r"clip: null.*std: group.*storage: per_sample"):
        bound("streaming", advantage, 32)


def test_one_schedule_serves_two_runs():
    schedule = bound("auto", GroupAdvantage(clip=5.0), 4)
    assert schedule.wants_rewards_early
    schedule.bind(Update(TinyPolicy(), torch.zeros(1, 32), advantage=GroupAdvantage(clip=5.0)).context())
    assert not schedule.wants_rewards_early


def test_unknown_storage():
    with pytest.raises(ValueError, match="storage='sharded'"):
        Reweight("sharded")

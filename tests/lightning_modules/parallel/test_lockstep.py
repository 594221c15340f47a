"""Ranks that must make the same policy calls: how many each step takes, and calls that leave nothing behind."""

import pytest
import torch
from torch import nn

from lightning_modules.parallel.layout import Layout
from lightning_modules.parallel.lockstep import Lockstep, peers
from lightning_modules.types import Conditioning


def first_steps(rows):
    """Row (prompt, generation) trains the first ``generation`` of three steps."""
    return torch.arange(3) < rows.generation[:, None]


def test_everybody_s_share_by_hand():
    """Five generations on two ranks: rank 0 makes 0, 2, 4, rank 1 makes 1, 3; in one round."""
    layout = Layout(prompts=1, generations=5, ranks=2)
    (chunk,) = layout.chunks()
    seen = peers(layout, chunk.rounds[0], first_steps, in_step=True)
    assert seen.rows.generation.tolist() == [0, 2, 4, 1, 3]
    assert seen.rows.prompt.tolist() == [0] * 5
    assert seen.trained.sum(1).tolist() == [0, 2, 3, 1, 3]
    assert seen.most_trained == (2, 2, 1)  # step 0: rank 0 trains generations 2, 4 and rank 1 generations 1, 3
    assert seen.any_free == (True, True, True)
    assert seen.in_step


def test_no_row_is_free_where_all_train():
    layout = Layout(prompts=1, generations=3, ranks=2)
    (chunk,) = layout.chunks()
    seen = peers(layout, chunk.rounds[0], lambda rows: torch.ones(len(rows), 2, dtype=torch.bool), in_step=False)
    assert seen.any_free == (False, False)
    assert seen.most_trained == (2, 2)
    assert not seen.in_step


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.w, self.calls = nn.Parameter(torch.ones(3)), []

    def forward(self, latents, sigma, conditioning):
        self.calls.append((len(latents), sigma.tolist(), conditioning.tensors["c"].tolist()))
        return latents * self.w + conditioning.tensors["c"]


def rows(count):
    return torch.ones(count, 3), torch.full((count,), 0.25), Conditioning(tensors={"c": torch.ones(count, 1)})


def test_a_call_with_rows_is_the_field_s_own():
    field = Field()
    assert Lockstep(field)(*rows(2)).tolist() == [[2.0] * 3] * 2


def test_a_call_without_rows_runs_the_stand_in_and_adds_exactly_nothing():
    field = Field()
    lockstep = Lockstep(field)
    lockstep.stand_in(torch.zeros(1, 3), Conditioning(tensors={"c": torch.full((1, 1), 7.0)}))
    velocity = lockstep(*rows(0))
    assert velocity.shape == (0, 3) and velocity.requires_grad
    assert field.calls == [(1, [0.5], [[7.0]])]
    velocity.sum().backward()
    assert field.w.grad is not None and field.w.grad.tolist() == [0.0, 0.0, 0.0]


def test_without_a_stand_in_that_is_a_mistake_of_ours():
    with pytest.raises(AssertionError, match="before there is a stand-in"):
        Lockstep(Field())(*rows(0))

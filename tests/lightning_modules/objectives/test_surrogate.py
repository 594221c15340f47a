"""The clipped surrogate by hand, and its gradient at ratio 1."""

import math

import torch

from lightning_modules.objectives.surrogate import clipped_surrogate, on_policy_surrogate


def test_values_by_hand():
    log_prob = torch.tensor([0.0, math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)])
    coefficient = torch.tensor([-2.0, -2.0, 2.0, -2.0, 2.0])  # negative: positive advantage
    loss, ratio = clipped_surrogate(log_prob, torch.zeros(5), coefficient, clip_range=0.2)
    torch.testing.assert_close(ratio, torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5]))
    # max(c rho, c clip(rho)): a good sample's gain stops at 1.2, a bad sample's loss is never softened
    torch.testing.assert_close(loss, torch.tensor([-2.0, -2.4, 3.0, -1.0, 1.6]))


def test_gradient_stops_exactly_where_the_clip_binds():
    log_prob = torch.log(torch.tensor([1.5, 1.5, 0.5, 0.5])).requires_grad_()
    coefficient = torch.tensor([-1.0, 1.0, -1.0, 1.0])
    clipped_surrogate(log_prob, torch.zeros(4), coefficient, 0.2)[0].sum().backward()
    torch.testing.assert_close(log_prob.grad, torch.tensor([0.0, 1.5, -0.5, 0.0]))


def test_on_policy_both_have_the_coefficient_as_gradient_bit_for_bit():
    rollout = torch.randn(64, generator=torch.Generator().manual_seed(0)) * 3
    coefficient = torch.randn(64, generator=torch.Generator().manual_seed(1)) / 7
    for surrogate in (
        lambda p: clipped_surrogate(p, rollout, coefficient, 1e-4)[0],
        lambda p: on_policy_surrogate(p, coefficient),
    ):
        log_prob = rollout.clone().requires_grad_()
        surrogate(log_prob).sum().backward()
        assert torch.equal(log_prob.grad, coefficient)

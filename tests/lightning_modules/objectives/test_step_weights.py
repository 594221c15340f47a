"""Step weights: mean 1 over the steps that can be trained, and Flash-GRPO's 1 / lambda."""

import pytest
import torch

from lightning_modules.flow.sigmas import LinearSigmas
from lightning_modules.flow.transitions import CPS, DanceSDE, FlowSDE
from lightning_modules.objectives.step_weights import ConstantStepWeights, InverseSensitivity

SIGMAS = LinearSigmas(3.0)(10)
CANDIDATES = torch.arange(10) < 9


@pytest.mark.parametrize("weights", [ConstantStepWeights(), InverseSensitivity()])
@pytest.mark.parametrize("transition", [FlowSDE(0.7), DanceSDE(0.3), CPS(0.8)])
def test_mean_one_over_the_candidates_and_nothing_elsewhere(weights, transition):
    table = weights(transition, SIGMAS, CANDIDATES)
    assert table[CANDIDATES].mean().item() == pytest.approx(1.0)
    assert not table[~CANDIDATES].any()


def test_inverse_sensitivity_by_the_paper_s_formula():
    """lambda = sqrt(dt) / s + s sqrt(dt) (1 - t) / (2 t), with DanceSDE's constant s."""
    table = InverseSensitivity()(DanceSDE(0.3), SIGMAS, CANDIDATES)
    t, dt = SIGMAS[:9], -SIGMAS.diff()[:9]
    rate = 1 / (dt.sqrt() / 0.3 + 0.3 * dt.sqrt() * (1 - t) / (2 * t))
    torch.testing.assert_close(table[:9], rate / rate.mean())


def test_the_weighted_gradient_has_the_same_size_at_every_step():
    """|d (w log p) / dv| is constant in expectation: w_t lambda_t does not depend on t."""
    product = InverseSensitivity()(FlowSDE(0.7), SIGMAS, CANDIDATES) * FlowSDE(0.7).sensitivity(SIGMAS)
    assert product[:9].max() == pytest.approx(product[:9].min().item())


def test_a_deterministic_step_cannot_be_weighted():
    with pytest.raises(ValueError, match=r"no weight for step\(s\) \[9\].*CPS"):
        InverseSensitivity()(CPS(0.8), SIGMAS, torch.ones(10, dtype=torch.bool))

"""The noise grids against hand-worked values, diffusers' FLUX shift, and every rule of `check_sigmas`."""

import math

import pytest
import torch

from lightning_modules.flow.sigmas import DynamicShiftSigmas, ExplicitSigmas, LinearSigmas, check_sigmas


def test_linear_grid_by_hand():
    assert LinearSigmas()(4).tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    # shift 3: 3s / (1 + 2s) at s = 3/4, 1/2, 1/4
    torch.testing.assert_close(
        LinearSigmas(3.0)(4), torch.tensor([1.0, 0.9, 0.75, 0.5, 0.0], dtype=torch.float64), rtol=1e-15, atol=0
    )


@pytest.mark.parametrize("shift", [0.3, 1.0, 2.1, 3.0, math.e, 7.7])
def test_grid_is_float64_and_its_ends_are_exact(shift):
    sigmas = LinearSigmas(shift)(37)
    assert sigmas.dtype == torch.float64 and sigmas.shape == (38,)
    assert sigmas[0] == 1 and sigmas[-1] == 0 and bool((sigmas.diff() < 0).all())


def test_dynamic_shift_by_hand():
    sigmas = DynamicShiftSigmas()
    assert sigmas.mu(256) == 0.5 and sigmas.mu(4096) == pytest.approx(1.15)
    assert sigmas.mu(1024) == pytest.approx(0.5 + 0.65 * 768 / 3840)  # 512 x 512 pixels: mu = 0.63
    assert float(sigmas(2, 1024)[1]) == pytest.approx(math.exp(0.63) / (math.exp(0.63) + 1))


def test_dynamic_shift_equals_diffusers():
    from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / 28, 28).tolist(), mu=DynamicShiftSigmas().mu(4096))
    torch.testing.assert_close(DynamicShiftSigmas()(28, 4096).float(), scheduler.sigmas, rtol=1e-6, atol=0)


def test_explicit_grid_is_returned_as_written_and_not_aliased():
    sigmas = ExplicitSigmas([0.9, 0.4, 0.0])
    sigmas(2).zero_()
    assert sigmas(2).tolist() == [0.9, 0.4, 0.0]
    with pytest.raises(ValueError, match=r"num_steps = 3 .* 2 steps"):
        sigmas(3)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.0], "at least two"),
        ([[1.0, 0.0]], "one dimension"),
        ([1.0, math.nan, 0.0], "finite"),
        ([1.1, 0.5, 0.0], "at most 1"),
        ([1.0, 0.5, 0.1], "exactly 0"),
        ([0.0, 0.5, 1.0], "exactly 0"),
        ([1.0, 0.5, 0.5, 0.0], "not strictly decreasing after position 1"),
        ([1.0, 0.5, 0.6, 0.0], "not strictly decreasing after position 1"),
    ],
)
def test_invalid_grids_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        check_sigmas(torch.tensor(values, dtype=torch.float64))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LinearSigmas(0.0), "shift = 0.0"),
        (lambda: LinearSigmas(math.inf), "shift = inf"),
        (lambda: LinearSigmas()(0), "num_steps = 0"),
        (lambda: DynamicShiftSigmas()(4), "num_tokens = None"),
        (lambda: DynamicShiftSigmas(base_tokens=9, max_tokens=9), "base_tokens = 9"),
        (lambda: ExplicitSigmas([1.0, 0.2]), "exactly 0"),
    ],
)
def test_invalid_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

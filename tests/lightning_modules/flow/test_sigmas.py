"""The noise grids against hand-worked values, diffusers' FLUX shift, and every rule of `check_sigmas`."""

import math

import numpy as np
import pytest
import torch

from lightning_modules.flow.sigmas import (
    DynamicShiftSigmas,
    EulerSigmas,
    ExplicitSigmas,
    LinearSigmas,
    UniPCSigmas,
    check_sigmas,
)

STEPS = (4, 10, 28, 50)


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


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("tokens", [256, 1024, 2025, 4096])
def test_dynamic_shift_is_the_grid_of_diffusers_flux_pipeline(num_steps, tokens):
    """The scheduler as released with FLUX.1-dev, set as ``FluxPipeline`` sets it (diffusers 0.42)."""
    from diffusers import FlowMatchEulerDiscreteScheduler
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    scheduler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True,
        shift=3.0,
        base_shift=0.5,
        max_shift=1.15,
        base_image_seq_len=256,
        max_image_seq_len=4096,
    )
    scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / num_steps, num_steps), mu=calculate_shift(tokens))
    ours = DynamicShiftSigmas()(num_steps, tokens)
    torch.testing.assert_close(ours.float(), scheduler.sigmas, rtol=1e-6, atol=0)
    torch.testing.assert_close(1000 * ours[:-1].float(), scheduler.timesteps, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("shift", [1.0, 3.0, 5.0])
def test_euler_grid_is_the_one_of_diffusers_sd3_pipeline(num_steps, shift):
    """``StableDiffusion3Pipeline`` (and ``WanPipeline`` with this scheduler) sets the number of steps and nothing else."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(num_steps)
    ours = EulerSigmas(shift)(num_steps)
    torch.testing.assert_close(ours.float(), scheduler.sigmas, rtol=1e-6, atol=0)
    torch.testing.assert_close(1000 * ours[:-1].float(), scheduler.timesteps, rtol=1e-6, atol=0)


@pytest.mark.parametrize("num_steps", STEPS)
@pytest.mark.parametrize("shift", [3.0, 5.0])
def test_unipc_grid_is_diffusers_but_for_its_guard_and_its_truncation(num_steps, shift):
    from diffusers import UniPCMultistepScheduler

    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)
    scheduler.set_timesteps(num_steps)
    ours = UniPCSigmas(shift)(num_steps)
    assert ours[0] == 1 and float(scheduler.sigmas[0]) == pytest.approx(1 - 1e-6, abs=1e-7)
    torch.testing.assert_close(ours[1:].float(), scheduler.sigmas[1:], rtol=1e-6, atol=0)
    truncated = (1000 * ours[:-1]).clamp(max=999).long()  # what diffusers' pipeline hands to the model
    assert truncated.tolist() == scheduler.timesteps.tolist()


def test_unipc_grid_of_earlier_versions_by_hand():
    # start 0.999, end 0, two steps: levels .999 and .4995, at shift 3: 3s / (1 + 2s)
    expected = [2.997 / 2.998, 1.4985 / 1.999, 0.0]
    assert UniPCSigmas(3.0, start=0.999, end=0.0)(2).tolist() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("sigmas", "expected"),
    [
        (EulerSigmas(3.0), [1.0, 0.8577, 0.6022, 0.0089, 0.0]),  # sd3: the shift of 0.002994 is 0.008929
        (EulerSigmas(1.0), [1.0, 0.667, 0.334, 0.001, 0.0]),
        (UniPCSigmas(3.0), [1.0, 0.9001, 0.7504, 0.5010, 0.0]),  # wan at 480p: s = 1, .75025, .5005, .25075
        (UniPCSigmas(5.0), [1.0, 0.9376, 0.8336, 0.6259, 0.0]),  # wan at 720p
    ],
)
def test_released_grids_at_four_steps_by_hand(sigmas, expected):
    assert sigmas(4).tolist() == pytest.approx(expected, abs=5e-5)


@pytest.mark.parametrize("make", [EulerSigmas, UniPCSigmas])
def test_released_grids_are_float64_with_exact_ends_for_any_number_of_steps(make):
    for num_steps in (1, 2, 3, 37, 1000):
        sigmas = make(3.0)(num_steps)
        assert sigmas.dtype == torch.float64 and sigmas.shape == (num_steps + 1,) and sigmas[0] == 1 and sigmas[-1] == 0


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
        (lambda: EulerSigmas(-1.0), "shift = -1.0"),
        (lambda: UniPCSigmas(math.nan), "shift = nan"),
        (lambda: UniPCSigmas(3.0, start=1.1), "start = 1.1"),
        (lambda: UniPCSigmas(3.0, start=0.5, end=0.5), "end = 0.5"),
        (lambda: LinearSigmas()(0), "num_steps = 0"),
        (lambda: DynamicShiftSigmas()(4), "num_tokens = None"),
        (lambda: DynamicShiftSigmas(base_tokens=9, max_tokens=9), "base_tokens = 9"),
        (lambda: ExplicitSigmas([1.0, 0.2]), "exactly 0"),
    ],
)
def test_invalid_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

"""The transitions against recorded reference values, torch.distributions, and Gaussian data in closed form."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from lightning_modules.flow.sigmas import LinearSigmas
from lightning_modules.flow.transitions import CPS, ODE, DanceSDE, FlowSDE, Transition, WanSDE

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "transitions.json").read_text())
F64 = torch.float64
SIGMAS = LinearSigmas(3.0)(6)
STOCHASTIC = [FlowSDE(), DanceSDE(), WanSDE(), CPS(), CPS(density="gaussian")]
GAUSSIAN = [t for t in STOCHASTIC if getattr(t, "density", "gaussian") == "gaussian"]


def name(value) -> str | None:
    return type(value).__name__ + getattr(value, "density", "") if isinstance(value, Transition) else None


def latents(seed: int = 0, shape: tuple[int, ...] = (2, 3, 4, 4), dtype: torch.dtype = F64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=F64).to(dtype) for _ in range(3)]


# --- reference values -------------------------------------------------------------------------------------------------


def reference_transition(kind: str, params: dict) -> Transition:
    match kind:
        case "flow_sde":
            return FlowSDE(params["noise_level"])
        case "flow_cps":
            return CPS(params["noise_level"])
        case "dance_sde":
            return DanceSDE(params["eta"])
        case "wan_sde":
            return WanSDE()
    raise AssertionError(kind)


def relative_l2(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(value - expected) / torch.linalg.vector_norm(expected))


@pytest.mark.parametrize("case", GOLDEN, ids=lambda c: f"{c['kind']}-{c['params']['num_steps']}-{c['step']}")
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_reference_values(case, dtype):
    x, v, x_next = (torch.tensor(case[k], dtype=dtype).reshape(case["shape"]) for k in ("x", "v", "x_next"))
    transition = reference_transition(case["kind"], case["params"])
    mean, std = transition.moments(x, v, torch.tensor(case["sigmas"], dtype=F64), case["step"])
    log_prob = transition.log_prob(x_next, mean, std)
    if "mean" in case:  # DanceGRPO's kernel reports no mean; its log-prob contains it
        assert relative_l2(mean.flatten(), torch.tensor(case["mean"], dtype=dtype)) < 1e-5
    assert relative_l2(std, torch.tensor(case["std"][0], dtype=dtype)) < 1e-5
    assert relative_l2(log_prob, torch.tensor(case["log_prob"], dtype=dtype)) < 1e-5


def test_every_kernel_has_reference_values_at_its_first_step():
    assert {c["kind"] for c in GOLDEN if c["step"] == 0} == {"flow_sde", "flow_cps", "dance_sde", "wan_sde"}


def test_flash_grpo_weights_of_wan():
    """Flash-GRPO tabulates ``1 / lambda`` for the first ten of Wan's 20 steps."""
    s = 1 - torch.linspace(1, 1 / 1000, 21, dtype=F64)
    sigmas = (3 * s / (1 + 2 * s)).flip(0)
    table = [7.4770, 7.0414, 6.6112, 6.1867, 5.7682, 5.3559, 4.9502, 4.5513, 4.1596, 3.7754]
    assert (1 / WanSDE().sensitivity(sigmas))[:10].tolist() == pytest.approx(table, abs=5.1e-5)


# --- one step ---------------------------------------------------------------------------------------------------------


def test_ode_is_euler():
    x, v, _ = latents()
    mean, std = ODE().moments(x, v, SIGMAS, 2)
    torch.testing.assert_close(mean, x + v * (SIGMAS[3] - SIGMAS[2]), rtol=1e-15, atol=1e-15)
    assert std == 0 and std.shape == ()


def test_flow_sde_at_pure_noise_by_hand():
    """sigma 1 -> 0.5 with noise level 1: s^2 = 1 / (1 - 0.5) = 2, dt = -0.5; the score gives v nothing."""
    table = FlowSDE(1.0).coefficients(torch.tensor([1.0, 0.5, 0.0]))
    assert table.latents.tolist() == pytest.approx([1 - 2 / 2 * 0.5, 1 - 1 / 1 * 0.5])
    assert table.velocity.tolist() == pytest.approx([-0.5, -0.5 * (1 + 1 * 0.5 / 1)])
    assert table.std.tolist() == pytest.approx([1.0, math.sqrt(0.5)])


def test_cps_keeps_signal_and_noise_levels():
    """With the true x_0 and eps, signal has coefficient 1 - sigma' and noise has variance sigma'^2 after the step."""
    x0, eps, _ = latents()
    for step in range(6):
        sigma, following = SIGMAS[step], SIGMAS[step + 1]
        mean, std = CPS(0.6).moments((1 - sigma) * x0 + sigma * eps, eps - x0, SIGMAS, step)
        kept = torch.sqrt((following**2 - std**2).clamp_min(0))
        torch.testing.assert_close(mean, (1 - following) * x0 + kept * eps)
        assert float(std) == pytest.approx(float(following) * math.sin(0.3 * math.pi))


@pytest.mark.parametrize("step", [0, 1, 4])
@pytest.mark.parametrize("transition", GAUSSIAN, ids=name)
def test_log_prob_and_kl_against_torch_distributions(transition, step):
    x, v, x_next = latents()
    mean, std = transition.moments(x, v, SIGMAS, step)
    reference, _ = transition.moments(x, v + 0.1 * x_next, SIGMAS, step)
    expected = Normal(mean, std).log_prob(x_next).mean((1, 2, 3))
    torch.testing.assert_close(transition.log_prob(x_next, mean, std), expected, rtol=1e-12, atol=0)
    expected = kl_divergence(Normal(mean, std), Normal(reference, std)).mean((1, 2, 3))
    torch.testing.assert_close(transition.kl(mean, reference, std), expected, rtol=1e-12, atol=0)
    assert bool((expected > 0).all())


@pytest.mark.parametrize("step", [0, 3])
def test_flow_cps_density_is_its_own_but_its_kl_is_not(step):
    x, v, x_next = latents()
    mean, std = CPS().moments(x, v, SIGMAS, step)
    torch.testing.assert_close(CPS().log_prob(x_next, mean, std), -((x_next - mean) ** 2).mean((1, 2, 3)))
    expected = kl_divergence(Normal(mean, std), Normal(mean + 0.1, std)).mean((1, 2, 3))
    torch.testing.assert_close(CPS().kl(mean, mean + 0.1, std), expected)


@pytest.mark.parametrize("transition", STOCHASTIC, ids=name)
def test_log_prob_is_independent_of_resolution(transition):
    x, v, x_next = latents()
    step = transition.moments(x, v, SIGMAS, 1)
    doubled = transition.moments(x.repeat(1, 1, 2, 2), v.repeat(1, 1, 2, 2), SIGMAS, 1)
    torch.testing.assert_close(
        transition.log_prob(x_next.repeat(1, 1, 2, 2), *doubled), transition.log_prob(x_next, *step)
    )


@pytest.mark.parametrize("step", [0, 2, 4])
@pytest.mark.parametrize("transition", STOCHASTIC, ids=name)
def test_gradient_wrt_velocity_is_lambda_times_noise(transition, step):
    x, v, noise = latents()
    v.requires_grad_()
    mean, std = transition.moments(x, v, SIGMAS, step)
    (gradient,) = torch.autograd.grad(transition.log_prob(mean + std * noise, mean, std).sum(), v)
    expected = transition.sensitivity(SIGMAS)[step] * noise / noise[0].numel()
    torch.testing.assert_close(gradient, -expected)  # the noise level falls, so b < 0


@pytest.mark.parametrize("transition", STOCHASTIC, ids=name)
def test_sensitivity_is_positive_and_infinite_only_on_deterministic_steps(transition):
    sensitivity, std = transition.sensitivity(SIGMAS), transition.coefficients(SIGMAS).std
    assert sensitivity.dtype == F64 and sensitivity.shape == (6,) and bool((sensitivity > 0).all())
    assert torch.equal(sensitivity.isinf(), std == 0)
    assert (std == 0).tolist() == [False] * 5 + [isinstance(transition, CPS)]


def test_sensitivity_of_the_ode_is_infinite():
    assert ODE().sensitivity(SIGMAS).tolist() == [math.inf] * 6


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transition", [*STOCHASTIC, ODE()], ids=name)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("given", "expected"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (F64, F64)]
)
def test_precision(transition, given, expected, autocast):
    x, v, x_next = latents(dtype=given)
    exact_mean, exact_std = transition.moments(x.double(), v.double(), SIGMAS, 1)
    tolerance = 1e-6 if expected == torch.float32 else 1e-14
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        mean, std = transition.moments(x, v, SIGMAS, 1)
        assert mean.dtype == std.dtype == expected
        torch.testing.assert_close(mean.double(), exact_mean, rtol=tolerance, atol=tolerance)
        if isinstance(transition, ODE):
            return
        results = (transition.log_prob(x_next, mean, std), transition.kl(mean, x, std))
    exact = (
        transition.log_prob(x_next.double(), exact_mean, exact_std),
        transition.kl(exact_mean, x.double(), exact_std),
    )
    for value, truth in zip(results, exact, strict=True):
        assert value.dtype == expected and value.shape == (2,)
        torch.testing.assert_close(value.double(), truth, rtol=10 * tolerance, atol=0)


def test_mixed_precision_follows_the_widest_input():
    x, v, _ = latents()
    assert FlowSDE().moments(x.bfloat16(), v.float(), SIGMAS, 0)[0].dtype == torch.float32
    assert FlowSDE().moments(x.bfloat16(), v, SIGMAS, 0)[0].dtype == F64


def test_next_latents_are_data():
    x, v, x_next = latents()
    x_next.requires_grad_()
    v.requires_grad_()
    mean, std = FlowSDE().moments(x, v, SIGMAS, 0)
    FlowSDE().log_prob(x_next, mean, std).sum().backward()
    assert x_next.grad is None and v.grad is not None


# --- Gaussian data in closed form -------------------------------------------------------------------------------------


def propagate(
    transition: Transition, sigmas: torch.Tensor, data_mean: float, data_variance: float
) -> tuple[float, float]:
    """Mean and variance at sigma = 0, from the exact marginal at ``sigmas[0]``, under the exact velocity.

    ``x_sigma ~ N((1 - sigma) m, V)``, ``V = (1 - sigma)^2 S^2 + sigma^2``, and
    ``v = E[eps - x_0 | x] = c (x - (1 - sigma) m) - m`` with ``c = (sigma - (1 - sigma) S^2) / V``.
    """
    table = transition.coefficients(sigmas)
    start = float(sigmas[0])
    mean, variance = (1 - start) * data_mean, (1 - start) ** 2 * data_variance + start**2
    steps = zip(sigmas[:-1].tolist(), table.latents.tolist(), table.velocity.tolist(), table.std.tolist(), strict=True)
    for sigma, a, b, std in steps:
        c = (sigma - (1 - sigma) * data_variance) / ((1 - sigma) ** 2 * data_variance + sigma**2)
        offset = -c * (1 - sigma) * data_mean - data_mean
        mean, variance = (a + b * c) * mean + b * offset, (a + b * c) ** 2 * variance + std**2
    return mean, variance


def variance_errors(transition, resolutions, *, start: float = 1.0, shift: float = 3.0, data_variance: float = 0.25):
    """Relative error of the variance at each number of steps; the mean is checked on the way."""
    errors = []
    for n in resolutions:
        # the part of the shifted line below `start`, itself spread evenly
        s = torch.linspace(start / (shift - (shift - 1) * start), 0, n + 1, dtype=F64)
        mean, variance = propagate(transition, shift * s / (shift * s + 1 - s), 0.7, data_variance)
        assert mean == pytest.approx(0.7, rel=1e-10)  # the score vanishes at the mean: every transition keeps it
        errors.append(abs(variance / data_variance - 1))
    return torch.tensor(errors, dtype=F64)


def slope(resolutions: list[int], errors: torch.Tensor) -> float:
    """Exponent of the least-squares power law through the errors."""
    x, y = torch.tensor(resolutions, dtype=F64).log(), errors.log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


RESOLUTIONS = [50, 100, 200, 400, 1000]


@pytest.mark.parametrize("data_variance", [0.09, 0.25, 1.0, 4.0])
@pytest.mark.parametrize(
    ("transition", "start"),
    [(DanceSDE(), 1.0), (WanSDE(), 1.0), (ODE(), 1.0), (FlowSDE(), 0.9), (FlowSDE(1.2), 0.9)],
    ids=["dance", "wan", "ode", "flow", "flow-1.2"],
)
def test_gaussian_data_is_reached_at_first_order(transition, start, data_variance):
    errors = variance_errors(transition, RESOLUTIONS, start=start, data_variance=data_variance)
    assert slope(RESOLUTIONS, errors) == pytest.approx(-1, abs=0.1)
    assert float(errors[-1]) < 0.01


@pytest.mark.parametrize("noise_level", [0.4, 0.7, 1.0, 1.2])
@pytest.mark.parametrize("data_variance", [0.09, 0.25, 1.0, 4.0])
def test_flow_sde_from_pure_noise_is_within_one_per_cent(data_variance, noise_level):
    assert float(variance_errors(FlowSDE(noise_level), [1000], data_variance=data_variance)[0]) < 0.01


def test_flow_sde_from_pure_noise_falls_as_one_over_n_for_noise_level_one():
    errors = variance_errors(FlowSDE(1.0), RESOLUTIONS)
    assert slope(RESOLUTIONS, errors) == pytest.approx(-1, abs=0.1)


@pytest.mark.parametrize("noise_level", [0.5, 0.7])
def test_flow_sde_forgets_its_first_step_as_documented(noise_level):
    """Asymptotically N^(-noise_level^2): the diffusion is not integrable at sigma = 1."""
    resolutions = [8000, 16000, 32000]
    errors = variance_errors(FlowSDE(noise_level), resolutions, shift=1.0, data_variance=1.0)
    assert slope(resolutions, errors) == pytest.approx(-(noise_level**2), abs=0.03)


@pytest.mark.parametrize("noise_level", [0.4, 0.8])
@pytest.mark.parametrize("data_variance", [0.25, 4.0])
def test_cps_does_not_reach_gaussian_data(data_variance, noise_level):
    errors = variance_errors(CPS(noise_level), [1000, 16000], data_variance=data_variance)
    limit = 1 - math.cos(noise_level * math.pi / 4) ** 2
    assert float(errors[0]) > 0.9 * limit
    assert float(errors[1]) == pytest.approx(limit, rel=0.06)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transition", [ODE(), CPS(), CPS(density="gaussian")], ids=name)
def test_a_deterministic_step_has_no_density(transition):
    x, v, x_next = latents()
    mean, std = transition.moments(x, v, SIGMAS, 5)
    with pytest.raises(ValueError, match=r"std = 0.0: .* no log-probability"):
        transition.log_prob(x_next, mean, std)
    with pytest.raises(ValueError, match="no KL divergence"):
        transition.kl(mean, x, std)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FlowSDE(0.0), "noise_level = 0.0"),
        (lambda: FlowSDE(math.nan), "noise_level = nan"),
        (lambda: DanceSDE(-0.3), "eta = -0.3"),
        (lambda: CPS(0.0), "noise_level = 0.0"),
        (lambda: CPS(1.01), "noise_level = 1.01"),
        (lambda: CPS(density="normal"), "density = 'normal'"),  # pyright: ignore[reportArgumentType]
        (lambda: FlowSDE().coefficients(SIGMAS.flip(0)), "exactly 0"),
        (
            lambda: FlowSDE().coefficients(torch.tensor([0.999999, 0.98, 0.5, 0.0])),
            r"step 0 .* start the grid at exactly 1",
        ),
        (lambda: FlowSDE().moments(SIGMAS, SIGMAS, SIGMAS, 6), "step = 6: .* 0 to 5"),
        (lambda: FlowSDE().moments(SIGMAS, SIGMAS, SIGMAS, -1), "step = -1"),
    ],
)
def test_invalid_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()

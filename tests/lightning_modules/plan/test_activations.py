"""Imagined activations against the memory that a real forward allocates and keeps, as PyTorch's profiler counts it."""

import copy
from contextlib import nullcontext

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from lightning_modules.flow.denoise import ReverseProcess
from lightning_modules.flow.sigmas import LinearSigmas
from lightning_modules.flow.transitions import FlowSDE
from lightning_modules.plan.activations import innermost, measure
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from tests.tiny import TinyPolicy
from tests.tiny_models import PROMPTS, policy

ROWS = 2


def process(velocity):
    return ReverseProcess(velocity=velocity, transition=FlowSDE(0.7), sigmas=LinearSigmas(3.0)(4))


def bf16_autocast():
    return torch.autocast("cpu", torch.bfloat16)


def kept(function):
    """Net bytes that ``function`` allocates while its result is held."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()  # noqa: F841
    return sum(event.self_cpu_memory_usage for event in profiler.events())


def measured(model, conditioning, blocks, autocast):
    """Bytes that a further trained step adds, from real forwards of two and of three."""
    latents, after = (torch.randn(ROWS, *model.latent_shape) for _ in range(2))
    reverse, every = process(model), torch.arange(ROWS)

    def graphs(steps):
        made = []
        for _ in range(steps):
            mean, std = reverse.moments(1, latents, conditioning.rows(every))
            made.append(reverse.transition.log_prob(after, mean, std))
        return made

    with autocast():
        graphs(1)  # lazily made constants
        steps = {count: kept(lambda count=count: graphs(count)) for count in (2, 3)}
    # each checkpointed block also keeps the state of the CPU's random generator: no activation, and not on the device
    return steps[3] - steps[2] - kept(lambda: [torch.get_rng_state() for _ in range(blocks)])


CASES = {  # family, trainable, guidance, checkpointing, autocast
    "sd3-lora-guided": ("sd3", "lora", True, False, nullcontext),
    "sd3-full-mixed": ("sd3", "full", False, False, bf16_autocast),
    "flux-full": ("flux", "full", False, False, nullcontext),
    "flux-lora-checkpointed": ("flux", "lora", False, True, nullcontext),
    "wan21-lora-mixed": ("wan21", "lora", False, False, bf16_autocast),
    "wan22-full-guided-checkpointed": ("wan22", "full", True, True, nullcontext),
}


@pytest.mark.parametrize("case", CASES)
def test_imagined_bytes_are_the_allocated_ones(case):
    family, trainable, guided, checkpointed, autocast = CASES[case]
    model = policy(family, trainable=trainable, activation_checkpointing=checkpointed).eval()
    blocks = 2 if checkpointed else 0
    model = ClassifierFreeGuidance(model, 4.5) if guided else model
    conditioning = model.encode(PROMPTS[:1]).rows(torch.zeros(ROWS, dtype=torch.int64))
    imagined = measure(model, process(model), conditioning, ROWS, step=1, autocast=autocast)
    assert imagined.per_step == pytest.approx(measured(model, conditioning, blocks, autocast), rel=0.02)
    assert imagined.backbone_rows == ROWS * (2 if guided else 1)


def test_by_hand():
    """TinyPolicy keeps the inputs of its two linear layers; the second is what tanh needs too."""
    model = TinyPolicy().eval()
    imagined = measure(model, process(model), model.encode(["x"]), 1)
    width, hidden = 3 * 4 * 4, 8
    layers = 4 * ((width + 3) + hidden)
    residual = 4 * width  # the log-probability squares it
    assert layers + residual <= imagined.per_step <= layers + residual + 4 * 8  # and a few scalars
    assert imagined.once < 100


def test_autocast_copies_of_trained_weights_are_counted_once():
    model = policy("sd3", trainable="full").eval()
    conditioning = model.encode(PROMPTS[:1])
    plain, mixed = (
        measure(model, process(model), conditioning, 1, autocast=autocast) for autocast in (nullcontext, bf16_autocast)
    )
    matrices = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert plain.once < 100 and mixed.once == pytest.approx(2 * matrices, rel=0.1)
    assert mixed.per_step < plain.per_step


def test_checkpointing_keeps_less_and_more_rows_keep_more():
    held = {}
    for checkpointed in (False, True):
        model = policy("wan21", frames=5, activation_checkpointing=checkpointed).eval()
        conditioning = model.encode(PROMPTS[:1])
        held[checkpointed] = [measure(model, process(model), conditioning, rows).per_step for rows in (1, 3)]
    assert held[True][0] < held[False][0] / 2
    # rotary frequencies do not grow with the rows
    assert all(2.5 * one < three <= 3 * one for one, three in held.values())


def test_the_policy_is_left_alone():
    model = policy("flux").eval()
    before = copy.deepcopy(model.state_dict())
    conditioning = model.encode(PROMPTS[:1])
    latents, sigma = torch.randn(1, *model.latent_shape), torch.tensor([0.5])
    velocity = model(latents, sigma, conditioning)
    tensors = [id(p) for p in model.parameters()]
    measure(model, process(model), conditioning, 2)
    assert [id(p) for p in model.parameters()] == tensors and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(velocity, model(latents, sigma, conditioning))
    assert not innermost(model)._forward_pre_hooks


def test_weights_on_meta_and_another_device_will_do():
    """No accelerator is needed to plan for one."""
    model = policy("sd3").eval()
    conditioning = model.encode(PROMPTS[:1])
    real = measure(model, process(model), conditioning, 2)
    meta = policy("sd3").eval().to("meta")
    assert measure(meta, process(meta), conditioning, 2) == real
    elsewhere = measure(meta, process(meta), conditioning, 2, device="cuda")  # other kernels keep other things
    assert real.per_step / 2 < elsewhere.per_step < real.per_step * 2

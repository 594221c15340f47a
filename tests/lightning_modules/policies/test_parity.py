"""The door is right: with the same components, initial latents and guidance, our sampling loop gives what diffusers' own
pipelines give. Written against diffusers 0.42.1."""

import functools

import pytest
import torch

from lightning_modules.flow.denoise import ReverseProcess, denoise
from lightning_modules.flow.sigmas import ExplicitSigmas
from lightning_modules.flow.transitions import ODE
from lightning_modules.policies.flux import pack, unpack
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.types import Request, Rows
from tests.tiny_models import PROMPTS, SIZE, TOKENS, pipeline, policy

NEGATIVE = "blue"
shared = functools.cache(pipeline)


def sizes(family):
    unit = SIZE[family]
    return [(2 * unit, 2 * unit), (3 * unit, 2 * unit)]


CASES = [
    *[("sd3", size, 1, 1.0, "", steps) for size in sizes("sd3") for steps in (1, 5)],
    *[("sd3", size, 1, 4.5, negative, 4) for size in sizes("sd3") for negative in ("", NEGATIVE)],
    *[("flux", size, 1, guidance, "", 4) for size in sizes("flux") for guidance in (0.0, 1.0, 3.5)],
    *[("wan21", sizes("wan21")[1], frames, 1.0, "", 3) for frames in (1, 5, 9)],
    *[("wan21", sizes("wan21")[0], frames, 5.0, NEGATIVE, 3) for frames in (1, 5)],
    *[("wan22", size, 5, scale, NEGATIVE, 3) for size, scale in zip(sizes("wan22"), (5.0, 1.0), strict=True)],
]


def theirs(family, initial, height, width, frames, guidance, negative, steps):
    """(latents, images) of the pipeline, in our shapes."""
    pipe, outcome = shared(family), []
    video = {"num_frames": frames} if family.startswith("wan") else {}
    guided = {} if family == "flux" or guidance == 1 else {"negative_prompt": [negative] * len(initial)}
    for output_type in ("latent", "pt"):
        out = pipe(
            list(PROMPTS[: len(initial)]), height=height, width=width, num_inference_steps=steps, output_type=output_type,
            max_sequence_length=TOKENS, latents=pack(initial) if family == "flux" else initial, guidance_scale=guidance,
            **video, **guided,
        )  # fmt: skip
        outcome.append(out.frames if video else out.images)
    latents, images = outcome
    if family == "flux":
        latents = unpack(latents, *initial.shape[-2:])
    return latents, images.transpose(1, 2) if video else images


def ours(family, height, width, frames, guidance, negative):
    options = {"frames": frames} if family.startswith("wan") else {}
    if family == "flux":
        options["guidance"] = guidance
    mine = policy(family, shared(family), trainable="full", height=height, width=width, **options)
    return (
        mine if family == "flux" or guidance == 1 else ClassifierFreeGuidance(mine, guidance, negative, batched=False)
    )


def sample(mine, initial, grid):
    """(latents, images) of our loop."""
    n, steps = len(initial), len(grid) - 1
    none = torch.zeros(n, steps, dtype=torch.bool)
    request = Request(
        rows=Rows(prompt=torch.arange(n), generation=torch.zeros(n, dtype=torch.int64)),
        conditioning=mine.encode(PROMPTS[:n]), initial=initial, noise=lambda step: torch.zeros_like(initial),
        trained=none, stochastic=none,
    )  # fmt: skip
    grid = ExplicitSigmas(grid)(steps)
    latents = denoise(ReverseProcess(velocity=mine, transition=ODE(), sigmas=grid), request)
    return latents, mine.decode(latents)


@pytest.fixture(autouse=True)
def _one_thread():
    """The order of sums, and with it the last bits, depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("family", "size", "frames", "guidance", "negative", "steps"), CASES)
def test_latents_and_images_are_the_pipelines(family, size, frames, guidance, negative, steps):
    mine = ours(family, *size, frames, guidance, negative)
    initial = torch.randn(2, *mine.latent_shape)
    latents, images = theirs(family, initial, *size, frames, guidance, negative, steps)
    my_latents, my_images = sample(mine, initial, grid=shared(family).scheduler.sigmas.tolist())
    assert my_images.shape == images.shape == ((2, 3, frames, *size) if family.startswith("wan") else (2, 3, *size))
    for got, expected in ((my_latents, latents), (my_images, images)):
        assert (
            got - expected
        ).norm() < 1e-5 * expected.norm()  # relative L2: single elements depend on the thread count
    assert images.std() > 0.05  # no flat picture, which would agree with anything

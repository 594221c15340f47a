"""Native, Retain and Reweight compute the same gradient on every family, adapted or whole, guided or not, with and without
activation checkpointing."""

import itertools

import pytest
import torch

from lightning_modules.advantages import GroupAdvantage
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from tests.harness import Update, relative
from tests.tiny_models import PROMPTS, move, policy

REWARDS = [[0.1, 0.9]]
CASES = [
    case
    for case in itertools.product(("sd3", "flux", "wan21", "wan22"), ("lora", "full"), (False, True), (False, True))
    if not (case[0] == "flux" and case[2])  # its guidance is embedded
]


def build(family, trainable, guided, checkpointing, **options):
    video = {"frames": 5} if family.startswith("wan") else {}
    inner = policy(family, trainable=trainable, activation_checkpointing=checkpointing, **video, **options)
    move(inner)
    return ClassifierFreeGuidance(inner, 4.5, "blue") if guided else inner


@pytest.mark.parametrize(("family", "trainable", "guided", "checkpointing"), CASES)
def test_the_three_schedules_agree(family, trainable, guided, checkpointing):
    mine = build(family, trainable, guided, checkpointing)
    update = Update(mine, REWARDS, num_steps=3, texts=PROMPTS, advantage=GroupAdvantage(clip=None))
    native = update(Native())
    latents = update.latents
    trained = [name for name, p in mine.named_parameters() if p.requires_grad]
    silent = [name for name, g in zip(trained, native, strict=True) if g is None or not g.any()]
    assert all(part in name for name in silent for part in ("blocks.1.attn", "add")) and (not silent or family == "sd3")
    retain = update(Retain())
    assert all(torch.equal(a, b) for a, b in zip(native, retain, strict=True))
    assert torch.equal(latents, update.latents)
    for storage in ("per_sample", "streaming"):
        assert relative(update(Reweight(storage)), native) < 1e-5


@pytest.mark.parametrize("trainable", ["lora", "full"])
def test_kl_to_the_reference_is_the_same_in_all_three(trainable):
    mine = policy("sd3", trainable=trainable)
    reference = mine.reference()
    move(mine)
    update = Update(mine, REWARDS, num_steps=3, texts=PROMPTS, beta=0.3, reference=reference)
    native = update(Native())
    assert all(torch.equal(a, b) for a, b in zip(native, update(Retain()), strict=True))
    assert relative(update(Reweight("per_sample")), native) < 1e-5
    update.beta = 0.0
    assert relative(update(Native()), native) > 1e-4  # the KL term was not zero


@pytest.mark.parametrize("schedule", [Native(), Retain(), Reweight("streaming")], ids=["native", "retain", "reweight"])
def test_rows_through_the_transformer(schedule):
    """Guidance doubles the rows, checkpointing shows no further forward of the whole."""
    mine, seen = build("sd3", "lora", True, True), []
    mine.policy.transformer.register_forward_pre_hook(
        lambda m, a, kw: seen.append(len(kw["hidden_states"])), with_kwargs=True
    )
    update = Update(mine, REWARDS, num_steps=3, texts=PROMPTS, advantage=GroupAdvantage(clip=None))
    update(schedule)
    assert sum(seen) == 2 * 2 * (3 + 2 if isinstance(schedule, Native) else 3)

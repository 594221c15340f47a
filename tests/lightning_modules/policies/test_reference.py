import pytest
import torch

from lightning_modules.policies.base import Reference
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.policies.lora import adapter_layers
from lightning_modules.policies.reference import AdapterReference, reference_of
from lightning_modules.schedules.native import Native
from lightning_modules.schedules.retain import Retain
from lightning_modules.schedules.reweight import Reweight
from tests.loop import Scorer, fit, module
from tests.tiny_models import FAMILIES, PROMPTS, move, policy

KINDS = {"lora": AdapterReference, "full": Reference}


def question(mine):
    x = torch.randn(2, *mine.latent_shape, generator=torch.Generator().manual_seed(3))
    return x, torch.tensor([0.9, 0.3]), mine.encode(PROMPTS[:2])


def state_of(mine):
    return [layer.disable_adapters for layer in adapter_layers(mine)], [p.requires_grad for p in mine.parameters()]


@pytest.mark.parametrize("trainable", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_it_stays_at_the_start_while_the_policy_moves(family, trainable):
    mine = policy(family, trainable=trainable).eval()
    asked = question(mine)
    start = mine(*asked).detach()
    reference, before = mine.reference(), state_of(mine)
    assert type(reference) is KINDS[trainable]
    move(mine)
    moved = mine(*asked)
    anchor = reference(*asked)
    assert torch.equal(anchor, start) and not anchor.requires_grad
    assert (moved - anchor).norm() > 1e-3 * anchor.norm()
    assert state_of(mine) == before and torch.equal(mine(*asked), moved)


def test_adapters_that_add_something_at_the_start_are_no_anchor():
    mine = policy("sd3")
    move(mine)
    with pytest.raises(ValueError, match="adapters are not zero at the start.*or set beta: 0"):
        reference_of(mine)


def test_a_failing_forward_leaves_the_adapters_on():
    mine = policy("sd3")
    reference, before = mine.reference(), state_of(mine)
    x, sigma, conditioning = question(mine)
    with pytest.raises(RuntimeError):
        reference(x[:, :1], sigma, conditioning)  # too few channels
    assert state_of(mine) == before and not any(before[0])


def test_fingerprints_recognise_the_anchor():
    mine, same, other = policy("sd3"), policy("sd3"), policy("sd3")
    with torch.no_grad():
        other.transformer.proj_out.bias += 1e-3  # frozen under adapters
    name = mine.reference().fingerprint()
    move(mine)
    assert same.reference().fingerprint() == name != other.reference().fingerprint()
    full, moved = policy("sd3", trainable="full"), policy("sd3", trainable="full")
    before = full.reference().fingerprint()
    move(moved)
    assert moved.reference().fingerprint() != before == full.reference().fingerprint()


def test_a_copy_follows_the_trainers_precision_and_keeps_its_name():
    mine = policy("sd3", trainable="full")
    reference = mine.reference()
    name = reference.fingerprint()
    mine.to(torch.bfloat16)
    asked = question(mine)
    assert torch.equal(reference.like(mine)(*asked), mine(*asked))
    assert reference.fingerprint() == name


def frozen_weights(mine):
    return {name: p.detach().clone() for name, p in mine.named_parameters() if not p.requires_grad}


def brightness(images):
    return images.double().flatten(1).mean(1)


class Failing(Scorer):
    """Scores the first iteration and the second one's first group, then raises."""

    def on_rollout_end(self, trainer, pl_module, samples, scores):
        super().on_rollout_end(trainer, pl_module, samples, scores)
        if pl_module.iteration == 1 and len(self.sizes) == 4:
            raise RuntimeError("the reward failed")


@pytest.mark.parametrize("guided", [False, True], ids=["plain", "guided"])
@pytest.mark.parametrize("schedule", [Native, Retain, Reweight])
@pytest.mark.parametrize("trainable", KINDS)
@pytest.mark.parametrize("family", ["sd3", "wan21"])
def test_training_with_a_kl_term_leaves_everything_on_also_when_the_reward_raises(
    family, trainable, schedule, guided, tmp_path
):
    mine = policy(family, height=16, width=16, trainable=trainable)
    mine = ClassifierFreeGuidance(mine, 2.0).eval() if guided else mine.eval()
    before, start, frozen = state_of(mine), mine(*question(mine)).detach(), frozen_weights(mine)
    seen = []

    class Watching(Failing):
        def on_train_batch_end(self, trainer, pl_module, *_):
            seen.append(pl_module.iteration_metrics["kl"])

    model = module(schedule(), policy=mine, beta=0.1, num_steps=2, generations_per_prompt=2, lr=0.1)
    with pytest.raises(RuntimeError, match="the reward failed"):
        fit(model, 3, root=tmp_path, prompts=PROMPTS[:2], scorer=Watching(brightness))
    assert state_of(mine) == before and seen == [0.0]
    assert all(torch.equal(weight, frozen[name]) for name, weight in frozen_weights(mine).items())
    reference, asked = model._reference, question(mine)
    assert type(reference) is KINDS[trainable]
    assert torch.equal(reference(*asked), start) and not torch.equal(mine(*asked), start)  # one update moved the policy
    assert state_of(mine) == before
    if trainable == "full":
        assert not any(p.requires_grad or p.grad is not None for p in reference._policy.parameters())

import pytest
import torch
from diffusers import ModelMixin
from diffusers.configuration_utils import ConfigMixin

from lightning_modules.policies.activation_checkpointing import set_activation_checkpointing
from lightning_modules.policies.lora import LoRA, inject
from tests.tiny_models import sd3_transformer


def gradients(checkpointing, train, adapters):
    """(gradients, forwards of the blocks) of one forward and backward."""
    torch.manual_seed(0)
    transformer = sd3_transformer()
    if adapters:
        inject(transformer, LoRA(rank=2, alpha=4, targets=["attn.to_q", "ff.net.2"], init="kaiming"))
    transformer.train(train)
    set_activation_checkpointing(transformer, checkpointing)
    calls = []
    for block in transformer.transformer_blocks:
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    out = transformer(torch.randn(1, 4, 8, 8), torch.randn(1, 5, 24), torch.randn(1, 16), torch.tensor([500.0]))[0]
    forwards = len(calls)
    out.square().sum().backward()
    return [p.grad for p in transformer.parameters() if p.requires_grad], (forwards, len(calls))


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("adapters", [False, True], ids=["full", "lora"])
def test_same_gradient_bit_for_bit_for_one_more_forward_of_the_blocks(train, adapters):
    plain, counted = gradients(False, train, adapters)
    recomputed, again = gradients(True, train, adapters)
    assert counted == (2, 2) and again == (2, 4)
    for ours, theirs in zip(recomputed, plain, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or torch.equal(ours, theirs)
    assert any(g is not None and g.abs().sum() > 0 for g in plain)


def test_off_again():
    transformer = sd3_transformer()
    set_activation_checkpointing(transformer, True)
    assert transformer.is_gradient_checkpointing
    set_activation_checkpointing(transformer, False)
    assert not transformer.is_gradient_checkpointing


def test_a_model_without_checkpointed_blocks_is_named():
    class Plain(ModelMixin, ConfigMixin):
        _supports_gradient_checkpointing = False

    with pytest.raises(ValueError, match="Plain has no checkpointed blocks: set activation_checkpointing to false"):
        set_activation_checkpointing(Plain(), True)
    set_activation_checkpointing(Plain(), False)

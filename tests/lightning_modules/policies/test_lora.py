import copy

import pytest
import torch
from diffusers import FluxTransformer2DModel
from torch import nn

from lightning_modules.policies.lora import LoRA, adapted_layers, adapter_layers, adapters_off, inject, starts_from_base
from lightning_modules.state import trained_part
from tests.tiny_models import TRANSFORMERS, sd3_transformer

TARGETS = ("attn.to_q", "attn.to_out.0")
SMALL = LoRA(rank=2, alpha=6, targets=TARGETS)


def with_adapters(lora=SMALL, **options):
    transformer = sd3_transformer(**options)
    inject(transformer, lora)
    return transformer


def randomise(transformer):
    """Every B non-zero, so that the adapters do something."""
    with torch.no_grad():
        for name, parameter in transformer.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    return transformer


def ask(transformer, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    with torch.no_grad():
        return transformer(
            hidden_states=draw(2, 4, 8, 8), timestep=torch.tensor([700.0, 300.0]), encoder_hidden_states=draw(2, 5, 24),
            pooled_projections=draw(2, 16), return_dict=False,
        )[0]  # fmt: skip


def state_of(transformer):
    layers = adapter_layers(transformer)
    return [layer.disable_adapters for layer in layers], [p.requires_grad for p in transformer.parameters()]


def test_targets_are_full_names_or_last_parts_in_the_order_of_the_model():
    transformer = sd3_transformer()
    assert adapted_layers(transformer, ["attn.to_v", "attn.to_q", "transformer_blocks.1.ff.net.2"]) == [
        "transformer_blocks.0.attn.to_q", "transformer_blocks.0.attn.to_v",
        "transformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_v", "transformer_blocks.1.ff.net.2",
    ]  # fmt: skip
    assert "transformer_blocks.0.attn2.to_q" in adapted_layers(transformer, ["to_q"])
    assert adapted_layers(transformer, ["o_q", "to_q"][1:]) == inject(
        transformer, LoRA(rank=1, alpha=1, targets=["to_q"])
    )


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["attn.to_q", "to_query", "o_q"], "to_query, o_q match no layer of SD3Transformer2DModel.*to_out.0.*to_q"),
        (["attn"], "'attn' matches transformer_blocks.0.attn, a Attention: name the linear layers inside"),
        (["attn.norm_q"], "'attn.norm_q' matches .*norm_q, a RMSNorm"),
    ],
)
def test_a_target_that_fits_nothing_is_named_and_nothing_is_changed(targets, message):
    transformer = sd3_transformer()
    with pytest.raises(ValueError, match=message):
        inject(transformer, LoRA(rank=2, alpha=2, targets=targets))
    assert not adapter_layers(transformer) and all(p.requires_grad for p in transformer.parameters())


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_only_the_adapters_are_trainable(family):
    transformer = TRANSFORMERS[family]()
    names = inject(transformer, LoRA(rank=2, alpha=4, targets=["to_q", "to_out.0"]))
    trainable = {name for name, p in transformer.named_parameters() if p.requires_grad}
    assert trainable == {f"{name}.lora_{x}.default.weight" for name in names for x in "AB"}


def test_an_adapted_layer_computes_the_formula():
    """W = [[1, 2], [3, 4]], b = (1, -1), A = (1, 1), B = (2, -1)^T, r = 1, alpha = 3; x = (1, 2).

    W x + b = (6, 10); A x = 3; B A x = (6, -3); times alpha / r: (18, -9). Together (24, 1).
    """
    transformer = with_adapters(LoRA(rank=1, alpha=3, targets=["attn.to_q"]))
    layer = transformer.transformer_blocks[0].attn.to_q
    values = {
        layer.base_layer.weight: [[1.0, 2.0], [3.0, 4.0]], layer.base_layer.bias: [1.0, -1.0],
        layer.lora_A["default"].weight: [[1.0, 1.0]], layer.lora_B["default"].weight: [[2.0], [-1.0]],
    }  # fmt: skip
    with torch.no_grad():
        for parameter, corner in values.items():
            corner = torch.tensor(corner)
            parameter.zero_()[tuple(slice(n) for n in corner.shape)] = corner
        x = torch.tensor([1.0, 2.0] + [0.0] * 14)
        assert layer(x)[:2].tolist() == [24.0, 1.0]
        with adapters_off(transformer):
            assert layer(x)[:2].tolist() == [6.0, 10.0]


@pytest.mark.parametrize("init", ["gaussian", "kaiming"])
def test_training_starts_from_the_base_model_bit_for_bit(init):
    base = sd3_transformer()
    transformer = copy.deepcopy(base)
    inject(transformer, LoRA(rank=2, alpha=4, targets=TARGETS, init=init))
    assert starts_from_base(transformer) and torch.equal(ask(transformer), ask(base))
    assert not starts_from_base(randomise(transformer))


def test_gaussian_init_has_standard_deviation_one_over_r():
    transformer = with_adapters(LoRA(rank=8, alpha=8, targets=["ff.net.0.proj", "ff.net.2", "to_q", "to_k"]))
    a = torch.cat([p.flatten() for name, p in transformer.named_parameters() if "lora_A" in name])
    assert len(a) > 2000 and a.std().item() == pytest.approx(1 / 8, rel=0.1)


@pytest.mark.parametrize(("dtype", "expected"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)])
def test_adapters_have_their_own_dtype_beside_bf16_weights(dtype, expected):
    transformer = sd3_transformer().to(torch.bfloat16)
    inject(transformer, LoRA(rank=2, alpha=4, targets=TARGETS, dtype=dtype))
    dtypes = {p.requires_grad: p.dtype for p in transformer.parameters()}
    assert dtypes == {True: expected, False: torch.bfloat16}
    assert transformer.dtype == torch.bfloat16  # what a policy casts latents to


def test_injecting_twice_is_refused():
    with pytest.raises(ValueError, match="has adapters already: fuse or unload"):
        inject(with_adapters(), SMALL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank=0"), ({"alpha": 0.0}, "alpha=0.0"), ({"alpha": float("nan")}, "alpha=nan"),
        ({"targets": []}, r"targets=\[\]"), ({"targets": "to_q"}, "give a list"), ({"init": "pissa"}, "gaussian or kaiming"),
        ({"dtype": "float8"}, "dtype='float8': choose one of float32, bfloat16"),
    ],
)  # fmt: skip
def test_impossible_settings(change, message):
    with pytest.raises(ValueError, match=message):
        LoRA(**({"rank": 2, "alpha": 2.0, "targets": ["to_q"]} | change))


def test_off_means_the_base_model_and_on_again_exactly_as_before():
    base = sd3_transformer()
    transformer = randomise(with_adapters())
    trained, before = ask(transformer), state_of(transformer)
    with adapters_off(transformer):
        assert torch.equal(ask(transformer), ask(base)) and not torch.equal(ask(transformer), trained)
        assert all(layer.disable_adapters for layer in adapter_layers(transformer))
    assert state_of(transformer) == before and torch.equal(ask(transformer), trained)


def test_everything_is_restored_after_an_exception_also_what_was_unusual():
    transformer = randomise(with_adapters())
    layers = adapter_layers(transformer)
    layers[0].lora_A["default"].weight.requires_grad_(False)  # frozen on purpose
    transformer.proj_out.bias.requires_grad_(True)
    layers[1].enable_adapters(False)  # off on purpose
    before = state_of(transformer)
    with pytest.raises(KeyError), adapters_off(transformer), adapters_off(transformer):
        raise KeyError
    assert state_of(transformer) == before
    assert before[0].count(True) == 1


def test_gradients_of_an_earlier_forward_survive_an_excursion_to_the_base_model():
    """As with the KL of a retained rollout: graph first, reference forward in between, backward last."""
    gradients = []
    for excursion in (False, True):
        torch.manual_seed(0)
        transformer = randomise(with_adapters())
        layer = transformer.transformer_blocks[0].attn.to_q
        loss = layer(torch.ones(1, 16)).sum()
        if excursion:
            with adapters_off(transformer):
                ask(transformer)
        loss.backward()
        gradients.append(layer.lora_A["default"].weight.grad)
    assert gradients[0].abs().sum() > 0 and torch.equal(*gradients)


def test_without_adapters_there_is_nothing_to_switch_off():
    with (
        pytest.raises(ValueError, match="SD3Transformer2DModel has no adapters to switch off"),
        adapters_off(sd3_transformer()),
    ):
        pass


def test_merged_adapters_are_noticed_and_left_alone():
    transformer = randomise(with_adapters())
    merged = adapter_layers(transformer)[0]
    merged.merge()
    before = state_of(transformer)
    with pytest.raises(RuntimeError, match="1 of 4 adapters are still in effect"), adapters_off(transformer):
        pass
    assert state_of(transformer) == before and merged.merged


def test_a_flux_checkpoint_of_adapters_and_optimizer_is_about_two_gigabytes():
    """FLUX.1-dev, rank 64 on FlowGRPO's targets: 179,306,496 elements in fp32, with AdamW's two moments beside each."""
    from lightning_modules.policies.flux import FluxPolicy

    with torch.device("meta"):
        policy = nn.Module()
        policy.transformer = FluxTransformer2DModel(guidance_embeds=True)
        inject(policy.transformer, FluxPolicy.default_lora)
    trainable = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, foreach=False)
    for parameter in trainable:
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    weights = trained_part({f"policy.{k}": v for k, v in policy.state_dict().items()}, policy)
    moments = [value for slot in optimizer.state_dict()["state"].values() for value in slot.values()]
    assert len(weights) == 684 and sum(w.numel() for w in weights.values()) == 179_306_496
    size = sum(t.numel() * t.element_size() for t in [*weights.values(), *moments])
    assert 3 * 4 * 179_306_496 <= size < 2.2e9

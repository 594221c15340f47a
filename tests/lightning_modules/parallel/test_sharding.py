"""What is sharded into what, and that every rank then has the first one's weights."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.sharded import ShardedGradients
from lightning_modules.parallel.sharding import blocks, roots, shard
from lightning_modules.parallel.tensors import local, whole
from lightning_modules.policies.guidance import ClassifierFreeGuidance
from lightning_modules.policies.shapes import ShapesPolicy
from tests import tiny_models
from tests.rank_runs import Case, run
from tests.ranks import pool
from tests.tiny import TinyPolicy

BLOCKS = {
    "sd3": ["transformer_blocks.0", "transformer_blocks.1"],
    "flux": ["transformer_blocks.0", "single_transformer_blocks.0"],
    "wan21": ["blocks.0", "blocks.1"],
    "wan22": ["blocks.0", "blocks.1"],
}


def shapes():
    return ShapesPolicy(weights=None, num_layers=2, width=16, num_heads=2)


def names_of(modules, inside):
    names = {id(module): name for name, module in inside.named_modules()}
    return [names[id(module)] for module in modules]


@pytest.mark.parametrize("trainable", ["lora", "full"])
@pytest.mark.parametrize("family", BLOCKS)
def test_the_blocks_of_every_family(family, trainable):
    policy = tiny_models.policy(family, trainable=trainable)
    (root,) = roots(policy)
    assert root is policy.transformer
    assert names_of(blocks(root), root) == BLOCKS[family]


def test_the_transformer_behind_guidance_and_of_the_embedded_model():
    policy = tiny_models.policy("sd3")
    assert roots(ClassifierFreeGuidance(policy, scale=2.0)) == [policy.transformer]
    embedded = shapes()
    assert roots(embedded) == [embedded.transformer]
    assert names_of(blocks(embedded.transformer), embedded.transformer) == BLOCKS["sd3"]


def test_a_policy_without_a_transformer_is_one_unit():
    policy = TinyPolicy()
    assert roots(policy) == [policy]
    assert list(blocks(policy)) == []


def test_lists_inside_blocks_and_lists_of_different_things_are_no_blocks():
    inner = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    model = nn.Module()
    model.stage = nn.Module()
    model.stage.layers = nn.ModuleList([nn.Sequential(inner), nn.Sequential(inner)])
    model.heads = nn.ModuleList([nn.Linear(2, 2), nn.LayerNorm(2)])
    model.drops = nn.ModuleList([nn.Dropout(), nn.Dropout()])
    assert names_of(blocks(model), model) == ["stage.layers.0", "stage.layers.1"]


# on several ranks


def mesh(replicate=1):
    size = torch.distributed.get_world_size()
    if replicate == 1:
        return init_device_mesh("cpu", (size,), mesh_dim_names=("shard",))
    return init_device_mesh("cpu", (replicate, size // replicate), mesh_dim_names=("replicate", "shard"))


def question(policy, rows=2):
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(rows, *policy.latent_shape, generator=generator)
    return latents, torch.tensor([0.4, 0.7])[:rows], policy.encode(tiny_models.PROMPTS[:rows])


def sharded_policy(family, trainable, replicate, guided):
    """A policy whose weights differ from rank to rank, sharded -> what there is to see."""
    policy = tiny_models.policy(family, trainable=trainable)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.1 * torch.distributed.get_rank())
    outer = ClassifierFreeGuidance(policy, scale=2.0) if guided else policy
    first = {name: p.detach().clone() for name, p in outer.named_parameters()}
    requires = {name: p.requires_grad for name, p in outer.named_parameters()}
    outer.eval()
    with torch.no_grad():
        before = outer(*question(outer))
    shard(outer, mesh(replicate))
    after = {name: whole(p.detach()) for name, p in outer.named_parameters()}
    assert requires == {name: p.requires_grad for name, p in outer.named_parameters()}
    assert all(isinstance(p, DTensor) for p in outer.parameters())
    with torch.no_grad():
        velocity = outer(*question(outer))
    assert all(isinstance(p, DTensor) for p in outer.parameters())  # sharded again
    with torch.enable_grad():
        recorded = outer(*question(outer))
    assert recorded.requires_grad and all(isinstance(p, DTensor) for p in outer.parameters())
    return {
        "placements": {p.placements for p in outer.parameters()},
        "held": sum(local(p).numel() for p in outer.parameters()) / sum(p.numel() for p in outer.parameters()),
        "weights": (first, after),
        "velocities": (before, velocity, recorded.detach()),
        "units": [name for name, part in policy.transformer.named_modules() if isinstance(part, FSDPModule)],
        "classes": (type(outer).__name__, type(policy).__name__),
    }


@pytest.mark.parametrize(
    ("family", "trainable", "ranks", "replicate", "guided"),
    [
        ("sd3", "lora", 2, 1, False),
        ("flux", "full", 2, 1, False),
        ("wan22", "lora", 2, 1, True),
        ("wan21", "full", 4, 2, False),
    ],
)
def test_all_ranks_take_the_first_ones_weights(family, trainable, ranks, replicate, guided):
    results = pool(ranks).run(sharded_policy, family, trainable, replicate, guided)
    first, before = results[0]["weights"][0], results[0]["velocities"][0]
    for result in results:
        assert result["units"] == ["", *BLOCKS[family]] or sorted(result["units"]) == sorted(["", *BLOCKS[family]])
        assert result["placements"] == {(Shard(0),) if replicate == 1 else (Replicate(), Shard(0))}
        assert result["held"] == pytest.approx(replicate / ranks, rel=0.2)
        assert all(torch.equal(value, first[name]) for name, value in result["weights"][1].items())
        for velocity in result["velocities"][1:]:
            torch.testing.assert_close(velocity, before, rtol=1e-5, atol=1e-6)
        assert not any("FSDP" in name for name in result["classes"])
    assert not torch.equal(results[1]["velocities"][0], before)  # theirs were other weights


def a_second_time(family):
    policy = tiny_models.policy(family)
    shard(policy, mesh())
    parameters, hooks = list(policy.parameters()), len(policy.transformer._forward_pre_hooks)
    shard(policy, mesh())
    assert all(now is then for now, then in zip(policy.parameters(), parameters, strict=True))
    return len(policy.transformer._forward_pre_hooks) == hooks > 0


def test_a_second_time_nothing_happens():
    assert pool(2).run(a_second_time, "sd3") == [True, True]


def half_base_with_adapters(steps):
    """bf16 weights under fp32 adapters, in the same unit: the adapters' gradients, of every layer, and the outcome."""
    pipe = tiny_models.pipeline("sd3")
    pipe.transformer.to(torch.bfloat16)
    policy = tiny_models.policy("sd3", pipe, lora=tiny_models.tiny_lora("sd3"))
    shard(policy, mesh())
    trained = [(name, p) for name, p in policy.named_parameters() if p.requires_grad]
    gradients = ShardedGradients([p for _, p in trained], policy, Ranks.connected(20.0))
    optimizer = torch.optim.SGD([p for _, p in trained], lr=0.1)
    seen = []
    for _ in range(steps):
        buffer = gradients.buffer()
        with gradients.into(buffer):
            policy(*question(policy)).float().square().mean().backward()
        assert {part.dtype for part in buffer.tensors} == {torch.float32}
        gradients.deliver(gradients.reduce(buffer))
        seen.append({name: whole(p.grad).norm().item() for name, p in trained})
        optimizer.step()
        optimizer.zero_grad()
    gradients.ranks.close()
    dtypes = {p.dtype for _, p in trained}, {p.dtype for p in policy.parameters() if not p.requires_grad}
    return seen, dtypes


def test_every_adapter_on_half_precision_weights_gets_a_gradient():
    """B at the first step, and A as well once B is no longer zero; but in the last block no query of the text, whose result
    SD3 drops."""
    for (first, second), dtypes in pool(2).run(half_base_with_adapters, 2):
        assert dtypes == ({torch.float32}, {torch.bfloat16})
        assert len(first) == 30
        unused = {name for name in first if "transformer_blocks.1.attn.add_q_proj" in name}
        assert {name for name, norm in first.items() if not norm} == {n for n in first if ".lora_A." in n} | unused
        assert {name for name, norm in second.items() if not norm} == unused


def accumulated_dtypes(param_dtype, dtype):
    policy = shapes().to(dtype)
    shard(policy, mesh(), param_dtype=param_dtype)
    trained = list(policy.parameters())
    gradients = ShardedGradients(trained, policy, Ranks.connected(20.0))
    buffer = gradients.buffer()
    latents, sigma, conditioning = question(policy)
    with torch.autocast("cpu", torch.bfloat16, enabled=param_dtype is not None), gradients.into(buffer):
        for _ in range(2):
            policy(latents.to(dtype), sigma.to(dtype), conditioning).float().square().mean().backward()
    gradients.ranks.close()
    return {part.dtype for part in buffer.tensors}


@pytest.mark.parametrize(
    ("param_dtype", "dtype", "expected"),
    [
        (None, torch.float32, torch.float32),
        (torch.bfloat16, torch.float32, torch.float32),
        (None, torch.bfloat16, torch.float32),
        (None, torch.float64, torch.float64),
    ],
    ids=["fp32", "fp32 gathered in bf16", "bf16", "float64"],
)
def test_local_gradients_accumulate_in_at_least_fp32(param_dtype, dtype, expected):
    assert pool(2).run(accumulated_dtypes, param_dtype, dtype) == [{expected}] * 2


def of_two_dtypes():
    policy = shapes()
    policy.transformer.transformer_blocks[1].to(torch.float64).ff.to(torch.float32)
    shard(policy, mesh())


def test_trainable_parameters_of_two_dtypes_are_refused():
    with pytest.raises(
        Exception, match=r"JointTransformerBlock has trainable parameters of .*float32.*float64.*bf16-mixed"
    ):
        pool(2).run(of_two_dtypes)


def compiled():
    policy = tiny_models.policy("sd3", compile=True)
    shard(policy, mesh())


def test_a_compiled_transformer_is_refused():
    with pytest.raises(Exception, match="a compiled SD3Transformer2DModel is not proven .*compile to false"):
        pool(2).run(compiled)


@pytest.mark.parametrize(("policy", "schedule"), [("lora", "streaming"), ("full", "retain")])
def test_many_forwards_before_a_backward_with_activation_checkpointing(policy, schedule):
    """Nested units that are resharded while another forward's recomputation still needs them
    (github.com/pytorch/pytorch/issues/153354)."""
    case = Case(
        schedule=schedule, policy=policy, prompts=1, generations=3, policy_options={"activation_checkpointing": True}
    )
    alone = run(case)["gradients"][0].double()
    for result in pool(2).run(run, replace(case, strategy="fsdp2", ranks=2)):
        assert (result["gradients"][0].double() - alone).norm() < 5e-6 * alone.norm()

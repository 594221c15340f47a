"""Parameters sharded by FSDP2: the shards of the sum are those of what one process gets from everybody's rows."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from lightning_modules.parallel import sharded
from lightning_modules.parallel.ranks import Ranks
from lightning_modules.parallel.sharded import ShardedGradients
from lightning_modules.parallel.sharding import shard
from lightning_modules.parallel.tensors import whole
from tests.ranks import pool
from tests.reductions import ORDERS, Setting, Tiny, build, compare, mesh_of, reference, split, trainable

SENT = {2: 214, 4: 216}
"""Elements of the tiny model's gradient, padded to equal shards: 40 + 8 + 2 (56 + 8) + 28 + 4 + 6, on 4 ranks + 2."""


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", ["root", "nested"])
@pytest.mark.parametrize("size", [2, 4])
def test_the_sum_of_all_ranks(size, kind, order):
    for result in pool(size).run(compare, Setting(kind=kind, order=order, dtype=torch.float64)):
        assert result["error"] < 1e-12
        assert result["gaps"] == ["idle"]
        assert result["alike"] and not result["stray"]
        assert result["traffic"] == (1, 1, 8 * SENT[size])


@pytest.mark.parametrize("order", ORDERS)
def test_shards_within_a_node_replicas_across(order):
    for result in pool(4).run(compare, Setting(kind="nested", order=order, replicate=2, dtype=torch.float64)):
        assert result["error"] < 1e-12
        assert result["alike"] and not result["stray"]
        assert result["traffic"] == (1, 2, 8 * (214 + 107))  # scattered over 2 ranks, then the shard over the replicas


@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointing"])
@pytest.mark.parametrize(("model", "kind"), [("full", "nested"), ("lora", "nested"), ("lora", "root")])
def test_a_transformer(model, kind, checkpointing):
    for result in pool(2).run(compare, Setting(model=model, kind=kind, checkpointing=checkpointing, order="retain")):
        assert 0 < result["error"] < 5e-6
        assert result["alike"] and not result["stray"]


def test_a_transformer_on_a_mesh_of_two_dimensions():
    for result in pool(4).run(compare, Setting(model="lora", kind="nested", checkpointing=True, replicate=2)):
        assert 0 < result["error"] < 5e-6


@pytest.mark.parametrize(("empty", "gaps"), [((1,), ["idle"]), ((0, 2), ["gate", "idle"])])
def test_ranks_without_a_gradient_add_nothing(empty, gaps):
    for result in pool(4).run(compare, Setting(kind="nested", empty=empty)):
        assert result["error"] < 5e-6
        assert result["gaps"] == gaps


def test_where_all_are_empty_nothing_is_sent():
    for result in pool(2).run(compare, Setting(kind="nested", empty=(0, 1))):
        assert len(result["gaps"]) == 10
        assert result["traffic"] == (0, 0, 0)


def added_in_bfloat16(values, replicate):
    """[R, n, 2] float64, a slice for each rank -> their sum, and what was sent."""
    ranks, setting = Ranks.connected(20), Setting(kind="root", replicate=replicate)
    module = nn.Linear(2, values.shape[1], bias=False)
    split(module, setting)
    gradients = ShardedGradients(trainable(module), module, ranks, torch.bfloat16)
    total = gradients.buffer()
    total.tensors[0] = values[ranks.rank].float()
    reduced = gradients.reduce(total)
    dtype = reduced.tensors[0].dtype
    gradients.deliver(reduced)
    ranks.close()
    return whole(module.weight.grad), dtype, gradients.traffic.bytes


@pytest.mark.parametrize("replicate", [1, 2])
def test_a_sum_in_bfloat16_is_within_the_stated_bound(replicate):
    values = torch.randn(4, 500, 2, dtype=torch.float64).float().double()
    bound = 4 * 2**-8 * values.abs().sum(0) * (1 + 4 * 2**-8)
    for reduced, dtype, sent in pool(4).run(added_in_bfloat16, values, replicate):
        error = (reduced.double() - values.sum(0)).abs()
        assert dtype == torch.float32
        assert (error <= bound).all() and error.max() > 2**-9
        assert sent == 2 * 1000 * (1 if replicate == 1 else 1.5)


class Constant(nn.Module):
    """Its gradient is whatever it is called with."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(2))

    def forward(self, factor):
        return (factor * self.w).sum()


def accumulated_beside_bfloat16_weights():
    ranks, module = Ranks.connected(20), Constant()
    shard(module, mesh_of(Setting()), param_dtype=torch.bfloat16)
    gradients = ShardedGradients(trainable(module), module, ranks)
    total = gradients.buffer()
    with gradients.into(total):
        module(256.0).backward()
        for _ in range(4):
            module(1.0).backward()
    for _ in range(4):
        with gradients.into(total):
            module(1.0).backward()
    dtype = total.tensors[0].dtype
    gradients.deliver(gradients.reduce(total))
    ranks.close()
    return dtype, whole(module.w.grad)


def test_gradients_of_bfloat16_weights_accumulate_in_fp32():
    """256 + 1 is 256 in bf16: eight ones would be lost on each of the two ranks."""
    for dtype, gradient in pool(2).run(accumulated_beside_bfloat16_weights):
        assert dtype == torch.float32
        assert gradient.tolist() == [528.0, 528.0]


def step_of(setting):
    """Weights after a step of AdamW, and the distance to those of one process."""
    ranks = Ranks.connected(20)
    alone, _ = build(setting)
    for p, g in zip(trainable(alone), reference(setting, ranks.size), strict=True):
        p.grad = g
    module, loss = build(setting)
    split(module, setting)
    gradients = ShardedGradients(trainable(module), module, ranks)
    total = gradients.buffer()
    for k, factor in enumerate((1.0, -0.5, 2.0)):
        with gradients.into(total):
            (factor * loss(3 * ranks.rank + k)).backward()
    gradients.deliver(gradients.reduce(total))
    for parameters in (trainable(alone), trainable(module)):
        torch.optim.AdamW(parameters, lr=0.1, weight_decay=0.5).step()
    pairs = dict(module.named_parameters())
    distances = {name: (whole(pairs[name].detach()) - p).abs().max().item() for name, p in alone.named_parameters()}
    idle = whole(pairs["idle"].detach())
    ranks.close()
    return max(distances.values()), idle


def test_the_optimizer_takes_what_is_delivered():
    for distance, idle in pool(2).run(step_of, Setting(kind="nested", dtype=torch.float64)):
        assert distance < 1e-9
        assert idle.tolist() == [1.0, 1.0, 1.0]  # not even decayed


def refusals():
    ranks, setting = Ranks.connected(20), Setting(kind="nested")
    messages = []
    partly = Tiny()
    fully_shard(partly.first, mesh=mesh_of(setting))
    known = sharded.PRIVATE_NAMES
    whole_model = Tiny()
    split(whole_model, setting)
    for module, names in ((partly, known), (whole_model, (*known, "_renamed"))):
        sharded.PRIVATE_NAMES = names
        try:
            ShardedGradients(trainable(module), module, ranks)
        except (ValueError, RuntimeError) as error:
            messages.append(f"{type(error).__name__}: {error}")
        finally:
            sharded.PRIVATE_NAMES = known
    ranks.close()
    return messages


def test_what_cannot_work_is_refused():
    for outside, renamed in pool(2).run(refusals):
        assert outside.startswith(
            "ValueError: trainable parameters outside the sharded modules: gate, idle, blocks.0.weight"
        )
        assert renamed.startswith(
            f"RuntimeError: torch {torch.__version__} keeps the local gradients of FSDP2 elsewhere"
        )
        assert "_renamed" in renamed and "ddp" in renamed

"""Which strategies are taken, and that an option of a taken one changes nothing but what it says."""

from dataclasses import replace

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_modules.parallel.tensors import whole
from lightning_modules.strategies import FSDP2Strategy, check_strategy
from tests.loop import batches, fit, module
from tests.rank_runs import STRATEGIES, Capture, Case, GivenRewards, make_module, run
from tests.ranks import pool

SMALL = Case(schedule="retain", policy="lora", prompts=1, generations=3)
OPTIONS = STRATEGIES | {
    "fsdp2 by name": lambda: "fsdp2",
    "cpu_offload": lambda: FSDP2Strategy(cpu_offload=True),
    "param_dtype": lambda: FSDP2Strategy(param_dtype="bfloat16"),
    "find_unused_parameters": lambda: DDPStrategy(find_unused_parameters=True),
    "gradient_as_bucket_view": lambda: DDPStrategy(gradient_as_bucket_view=True),
}


class Unknown(SingleDeviceStrategy):
    """Somebody else's."""


def made(kind, **attributes):
    """A strategy of a kind whose own requirements (CUDA, other packages) do not matter here."""
    strategy = object.__new__(kind)
    strategy.__dict__.update(attributes)
    return strategy


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        (SingleDeviceStrategy(), "single"),
        (DDPStrategy(), "replicated"),
        (DDPStrategy(find_unused_parameters=True), "replicated"),
        (FSDP2Strategy(), "sharded"),
        (FSDP2Strategy(replicate=2), "sharded"),
    ],
)
def test_what_is_proven_is_taken(strategy, kind):
    assert check_strategy(strategy) == kind


class Mine(DDPStrategy):
    """Overrides who knows what."""


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (made(FSDPStrategy), r"FSDPStrategy \(FSDP1\) cannot do a manual backward.*; use ddp, or fsdp2"),
        (made(DeepSpeedStrategy), "DeepSpeedStrategy owns backward and optimizer step.*; use ddp, or fsdp2"),
        (
            ModelParallelStrategy(),
            "ModelParallelStrategy writes frozen weights into every checkpoint.*; use ddp, or fsdp2",
        ),
        (Unknown(), "strategy Unknown is not proven.*; use ddp, or fsdp2"),
        (Mine(), "strategy Mine is not proven.*; use ddp, or fsdp2"),
        (DDPStrategy(start_method="spawn"), "ddp started by 'spawn' is not proven; use ddp, or fsdp2"),
        (DDPStrategy(start_method="fork"), "ddp started by 'fork' is not proven; use ddp, or fsdp2"),
        (
            DDPStrategy(ddp_comm_hook=lambda state, bucket: bucket),
            "ddp_comm_hook is never called.*reduce_dtype: bfloat16",
        ),
        (DDPStrategy(model_averaging_period=4), "model_averaging_period lets ranks train apart.*remove it"),
        (DDPStrategy(static_graph=True), "static_graph: DDP then reduces gradients itself.*remove it"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Strategy) else None,
)
def test_what_is_not_proven_is_refused_with_the_reason_and_the_alternative(strategy, reason):
    with pytest.raises(ValueError, match=reason):
        check_strategy(strategy)


def test_the_module_refuses_when_it_is_set_up(tmp_path):
    model = module()
    model._trainer = Trainer(
        accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path, strategy=DDPStrategy(static_graph=True)
    )
    with pytest.raises(ValueError, match="static_graph"):
        model.setup("fit")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"replicate": 0}, "replicate=0: give 'nodes' or an integer of at least 1"),
        ({"replicate": "node"}, "replicate='node': give 'nodes' or an integer"),
        ({"param_dtype": "float16"}, "param_dtype='float16': choose bfloat16, or null"),
        ({"timeout": 0.0}, "timeout=0.0: give a positive number of seconds"),
    ],
)
def test_unusable_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        FSDP2Strategy(**arguments)


def test_half_precision_weights_want_half_precision_activations(tmp_path):
    with pytest.raises(
        ValueError, match="param_dtype: bfloat16 under precision 32-true: set trainer.precision: bf16-mixed"
    ):
        fit(module(), 1, root=tmp_path, strategy=FSDP2Strategy(param_dtype="bfloat16"))


def test_its_names_make_it():
    sharded, hybrid = (
        Trainer(accelerator="cpu", strategy=name, logger=False).strategy for name in ("fsdp2", "fsdp2_hybrid")
    )
    assert type(sharded) is type(hybrid) is FSDP2Strategy
    assert (sharded.replicate, hybrid.replicate) == (1, "nodes")


def test_offloaded_shards_have_a_backend_of_their_own_beside_nccl():
    cuda, cpu = torch.device("cuda", 0), torch.device("cpu")
    for offload, device, backend in ((True, cuda, "cpu:gloo,cuda:nccl"), (False, cuda, "nccl"), (True, cpu, "gloo")):
        strategy = FSDP2Strategy(cpu_offload=offload)
        strategy.parallel_devices = [device]
        strategy.cluster_environment = None
        assert strategy._get_process_group_backend() == backend


# on several ranks


def mesh(replicate, nodes=1):
    """The mesh's names and this rank's ranks along each of its dimensions."""
    strategy = FSDP2Strategy(replicate=replicate)
    strategy.parallel_devices = [torch.device("cpu")] * (torch.distributed.get_world_size() // nodes)
    strategy.num_nodes = nodes
    strategy.cluster_environment = Here()
    made: DeviceMesh = strategy._make_mesh()
    groups = [torch.distributed.get_process_group_ranks(made.get_group(k)) for k in range(made.ndim)]
    return made.mesh_dim_names, groups, strategy.distributed_sampler_kwargs


class Here:
    def local_rank(self):
        return 0

    def global_rank(self):
        return torch.distributed.get_rank()

    def world_size(self):
        return torch.distributed.get_world_size()


def test_ranks_of_a_node_are_neighbours():
    """Launchers number ranks node by node, so consecutive ranks shard together."""
    results = pool(4).run(mesh, 1)
    assert [names for names, _, _ in results] == [("shard",)] * 4
    assert results[3][1] == [[0, 1, 2, 3]]
    assert results[3][2] == {"num_replicas": 4, "rank": 3}
    for results in (pool(4).run(mesh, 2), pool(4).run(mesh, "nodes", 2)):
        assert [names for names, _, _ in results] == [("replicate", "shard")] * 4
        assert [groups for _, groups, _ in results] == [
            [[0, 2], [0, 1]],
            [[1, 3], [0, 1]],
            [[0, 2], [2, 3]],
            [[1, 3], [2, 3]],
        ]


def test_a_number_of_replicas_that_does_not_divide_the_ranks():
    with pytest.raises(Exception, match="replicate=3 does not divide the 4 processes: give the number of nodes"):
        pool(4).run(mesh, 3)


def run_with(case, precision):
    """``run`` with a strategy of :data:`OPTIONS`."""
    STRATEGIES.update(OPTIONS)
    return run(replace(case, trainer={"precision": precision}))


@pytest.mark.parametrize(("policy", "precision"), [("lora", "bf16-mixed"), ("full", "bf16-true")])
def test_every_precision_under_fsdp2(policy, precision):
    """As far from the same run in one process as the precision allows: bf16 has 8 bits, and rows are batched otherwise."""
    case = replace(SMALL, policy=policy, iterations=2)
    check(case, "fsdp2", precision, bound=5e-6 if precision == "32-true" else 2e-2)


def check(case, option, precision="32-true", bound=5e-6):
    alone = run(replace(case, trainer={"precision": precision}))
    for result in pool(2).run(run_with, case.on(option, 2), precision):
        for ours, theirs in zip(result["gradients"], alone["gradients"], strict=True):
            assert ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item() < bound
        assert result["metrics"][-1]["grad_norm"] == pytest.approx(
            alone["metrics"][-1]["grad_norm"], rel=max(bound, 1e-5)
        )


@pytest.mark.parametrize(
    "option", ["fsdp2 by name", "cpu_offload", "find_unused_parameters", "gradient_as_bucket_view"]
)
def test_an_option_that_changes_no_number(option):
    check(SMALL, option)


@pytest.mark.parametrize("policy", ["lora", pytest.param("full", marks=pytest.mark.slow)])
def test_weights_gathered_in_bfloat16(policy):
    check(replace(SMALL, policy=policy), "param_dtype", "bf16-mixed", bound=3e-2)


def sharded_module(case):
    """What ``fit`` leaves of a module: how many of the policy's parameters are sharded, of how many; the module's class."""
    model = make_module(case)
    fit(model, 1, root=".", scorer=GivenRewards(case.table), strategy=FSDP2Strategy(), devices=2, prompts=("a",))
    parameters = list(model.policy.parameters())
    return sum(isinstance(p, DTensor) for p in parameters), len(parameters), type(model).__name__


def test_frozen_weights_are_sharded_too_and_the_module_is_not():
    for sharded, all_of_them, name in pool(2).run(sharded_module, SMALL):
        assert sharded == all_of_them > 100
        assert name == "LeanGRPO"


class ShardsNothing(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 2)

    def configure_model(self):
        pass

    def training_step(self, batch, batch_idx):
        raise AssertionError

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_one_that_shards_nothing(root):
    Trainer(
        accelerator="cpu", devices=2, strategy=FSDP2Strategy(), logger=False, default_root_dir=root, max_epochs=1
    ).fit(ShardsNothing(), batches(1))


def test_a_module_that_shards_nothing_is_named(tmp_path):
    with pytest.raises(Exception, match="ShardsNothing shards nothing in configure_model: use strategy ddp for it"):
        pool(2).run(fit_one_that_shards_nothing, str(tmp_path))


def train_twice(case):
    """``fit`` twice on the same module, so that ``configure_model`` is called twice."""
    model, capture = make_module(case), Capture()
    before = None
    for _ in range(2):
        fit(model, 1, root=".", scorer=GivenRewards(case.table), callbacks=[capture], strategy=FSDP2Strategy(), devices=2,
            prompts=("a",))  # fmt: skip
        ids = [id(p) for p in model.policy.parameters()]
        assert before in (None, ids)  # not sharded again
        before = ids
    return torch.cat([whole(p.detach()).flatten() for p in model.policy.parameters() if p.requires_grad])


@pytest.mark.parametrize("case", [SMALL, replace(SMALL, policy="shapes", options={"beta": 0.5})], ids=["", "anchored"])
def test_configuring_the_model_twice_shards_it_once(case):
    first, second = pool(2).run(train_twice, case)
    assert torch.equal(first, second)


def test_the_anchor_of_a_second_fit_is_where_the_first_one_began(tmp_path):
    model = module(beta=0.5)
    first = fit(model, 1, root=tmp_path)
    second = fit(model, 1, root=tmp_path)
    assert first[0]["kl"] == 0.0 and second[0]["kl"] > 0.0


def then_replicated(case):
    """The error of a fit under DDP after one under FSDP2."""
    model = make_module(case)
    for strategy in (FSDP2Strategy(), DDPStrategy()):
        try:
            fit(model, 1, root=".", scorer=GivenRewards(case.table), strategy=strategy, devices=2, prompts=("a",))
        except ValueError as error:
            return type(strategy).__name__, str(error)


def test_a_sharded_module_is_refused_by_other_strategies():
    for where, message in pool(2).run(then_replicated, SMALL):
        assert where == "DDPStrategy" and message.startswith("the policy is still sharded")

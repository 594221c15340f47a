"""The Lightning strategies that LeanGRPO is proven with, and FSDP2 as one of them.

``FSDP2Strategy`` adds to Lightning's ``ModelParallelStrategy`` what this project needs: hybrid sharding, and checkpoints
that are one file with the trained part alone, the same whatever the strategy, so that a run may be resumed on any number of
processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
)
from lightning.pytorch.strategies.parallel import ParallelStrategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

from lightning_modules.parallel.sharding import shard
from lightning_modules.parallel.tensors import laid_out_like, local, whole

Kind = Literal["single", "replicated", "sharded"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
INSTEAD = "use ddp, or lightning_modules.strategies.FSDP2Strategy where the model does not fit"


def check_strategy(strategy: Strategy) -> Kind:
    """What a strategy does with the policy's parameters. Errors: ``ValueError`` on a strategy that is not proven, with the
    reason and the alternative."""
    name = type(strategy).__name__
    if isinstance(strategy, SingleDeviceStrategy) and type(strategy) is SingleDeviceStrategy:
        return "single"
    if isinstance(strategy, FSDP2Strategy):
        return "sharded"
    if isinstance(strategy, ModelParallelStrategy):
        raise ValueError(
            f"strategy {name} writes the frozen weights into every checkpoint and cannot shard within nodes alone; use "
            "lightning_modules.strategies.FSDP2Strategy"
        )
    if isinstance(strategy, FSDPStrategy):
        raise ValueError(f"strategy {name} (FSDP1) cannot do a manual backward inside training_step; {INSTEAD}")
    if isinstance(strategy, DeepSpeedStrategy):
        raise ValueError(f"strategy {name} owns the backward and the optimizer step, so gradients cannot be corrected "
                         f"before they are reduced; {INSTEAD}")  # fmt: skip
    if type(strategy) is DDPStrategy:
        if strategy._ddp_comm_hook is not None:
            raise ValueError(
                "ddp_comm_hook: gradients are reduced by the module itself; set model.init_args.reduce_dtype"
            )
        if strategy._start_method != "popen":
            raise ValueError(f"strategy ddp started by {strategy._start_method!r} is not proven; use ddp or torchrun")
        return "replicated"
    raise ValueError(f"strategy {name} is not proven to give the same gradient; {INSTEAD}")


class FSDP2Strategy(ModelParallelStrategy):
    """Fully sharded data parallelism (FSDP2) of the policy's transformer.

    Args:
        replicate: groups of ranks that each hold the whole model (hybrid sharding: shard within a node, replicate across
            with ``replicate`` = number of nodes); 1 shards over all ranks.
        param_dtype: what weights are gathered and computed in, ``float32``, ``bfloat16`` or ``float16``; ``None``: as they
            are held.
        cpu_offload: keep shards, and the optimizer's state with them, on the CPU.
        options: of ``ParallelStrategy``.

    Errors: ``ValueError`` on unusable arguments, or a number of ranks that ``replicate`` does not divide.
    """

    def __init__(
        self,
        replicate: int = 1,
        param_dtype: Literal["float32", "bfloat16", "float16"] | None = None,
        cpu_offload: bool = False,
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=False,
            process_group_backend=process_group_backend,
        )  # fmt: skip
        if replicate < 1:
            raise ValueError(f"replicate={replicate}: give an integer of at least 1")
        if param_dtype is not None and param_dtype not in DTYPES:
            raise ValueError(f"param_dtype={param_dtype!r}: choose one of {', '.join(DTYPES)}, or null")
        self.replicate, self.cpu_offload = replicate, cpu_offload
        self.param_dtype = None if param_dtype is None else DTYPES[param_dtype]
        self._mesh: DeviceMesh | None = None

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        self._setup_distributed()
        if self.world_size % self.replicate:
            raise ValueError(
                f"replicate={self.replicate} does not divide the {self.world_size} processes: give the number of nodes"
            )
        shape = (self.replicate, self.world_size // self.replicate)
        mesh = init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))
        self._mesh = mesh if self.replicate > 1 else mesh["shard"]
        self._device_mesh = init_device_mesh(
            self.root_device.type, (self.world_size, 1), mesh_dim_names=("data_parallel", "tensor_parallel")
        )

    def shard(self, module: torch.nn.Module) -> None:
        """Shard a policy in place, over this strategy's ranks."""
        assert self._mesh is not None
        shard(module.to(self.root_device), self._mesh, param_dtype=self.param_dtype, cpu_offload=self.cpu_offload)

    def model_to_device(self) -> None:
        """Shards are where they belong; buffers follow."""
        assert self.model is not None
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.root_device)

    # one checkpoint file, of the trained part, whatever the strategy

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The trained parameters, whole, on the CPU of every rank."""
        assert self.model is not None
        return {name: whole(p.detach()).cpu() for name, p in self.model.named_parameters() if p.requires_grad}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        assert self.model is not None
        parameters = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in checkpoint["state_dict"].items():
                local(parameters[name]).copy_(local(laid_out_like(value, parameters[name])))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state, whole, on the CPU of every rank."""
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = optimizer.state_dict()
        held = {key: {n: whole(v).cpu() if isinstance(v, torch.Tensor) else v for n, v in values.items()}
                for key, values in state["state"].items()}  # fmt: skip
        return state | {"state": held}

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                key: {n: _like(v, parameters[key]) for n, v in values.items()} for key, values in saved["state"].items()
            }
            optimizer.load_state_dict(saved | {"state": state})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        Strategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return Strategy.load_checkpoint(self, checkpoint_path, weights_only)


def _like(value: Any, parameter: torch.Tensor) -> Any:
    """A saved piece of optimizer state, sharded as its parameter if it has its shape (counters have not)."""
    if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
        return laid_out_like(value, parameter)
    return value

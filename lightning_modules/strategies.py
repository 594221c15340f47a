"""The Lightning strategies that LeanGRPO is proven with, and FSDP2 as one of them.

``FSDP2Strategy`` adds to Lightning's ``ModelParallelStrategy`` what this project needs: hybrid sharding, and checkpoints of
the trained part alone that are the same whatever the strategy, so that a run may be resumed on any number of processes.
Importing this module names it: ``trainer.strategy: fsdp2``, or ``fsdp2_hybrid`` (sharded within each node).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.strategies.parallel import ParallelStrategy
from lightning.pytorch.trainer import Trainer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_modules.parallel.checkpoints import gathered, is_sharded, read_shards, write_shards
from lightning_modules.parallel.sharding import shard
from lightning_modules.parallel.tensors import laid_out_like, local

Kind = Literal["single", "replicated", "sharded"]
INSTEAD = "use ddp, or fsdp2 (lightning_modules.strategies.FSDP2Strategy) where the model does not fit"


def check_strategy(strategy: Strategy) -> Kind:
    """What a strategy does with the policy's parameters. Errors: ``ValueError`` on a strategy that is not proven to give the
    same gradient, with the reason and the alternative."""
    name = type(strategy).__name__
    if isinstance(strategy, FSDP2Strategy):
        return "sharded"
    if type(strategy) is SingleDeviceStrategy:
        return "single"
    if type(strategy) is DDPStrategy:
        _check_ddp(strategy)
        return "replicated"
    raise ValueError(f"strategy {name} {_reason(strategy)}; {INSTEAD}")


def _reason(strategy: Strategy) -> str:
    """What is wrong with a strategy that is none of the proven ones."""
    if isinstance(strategy, ModelParallelStrategy):
        return "writes frozen weights into every checkpoint, in a form that no other strategy resumes"
    if isinstance(strategy, FSDPStrategy):
        return "(FSDP1) cannot do a manual backward inside training_step"
    if isinstance(strategy, DeepSpeedStrategy):
        return "owns backward and optimizer step, so that gradients cannot be corrected before they are reduced"
    return "is not proven to give the same gradient"


def _check_ddp(strategy: DDPStrategy) -> None:
    """Gradients are added up once, by the schedule: whatever else would change or reduce them is refused."""
    if strategy._ddp_comm_hook is not None:
        raise ValueError(
            "ddp_comm_hook is never called, as gradients are reduced once an update: for half the bytes set "
            "model.init_args.reduce_dtype: bfloat16"
        )
    if strategy._model_averaging_period is not None:
        raise ValueError(
            "model_averaging_period lets ranks train apart and averages weights, which is another method: remove it"
        )
    if strategy._ddp_kwargs.get("static_graph"):
        raise ValueError("static_graph: DDP then reduces gradients itself at the first backward; remove it")
    if strategy._start_method != "popen":
        raise ValueError(f"strategy ddp started by {strategy._start_method!r} is not proven; {INSTEAD}")


class FSDP2Strategy(ModelParallelStrategy):
    """Fully sharded data parallelism (FSDP2) of the policy's transformer, on one process or more.

    Args:
        replicate: groups of ranks that each hold the whole model (hybrid sharding): ``nodes`` shards within each node and
            replicates across nodes; 1 shards over all ranks.
        param_dtype: ``bfloat16``: under precision ``bf16-mixed``, gather weights in bf16: half the traffic and memory of an
            unsharded block, also of modules that the model's class keeps in fp32; ``None``: as they are held.
        cpu_offload: keep shards, and the optimizer's state with them, on the CPU.
        sharded_checkpoints: write a checkpoint as a folder to which every rank adds its shards, for models too large to be
            gathered by one process; ``False``: one file, gathered tensor by tensor. Either resumes everywhere.
        process_group_backend: of torch.distributed; ``None``: by the device (gloo on the CPU, NCCL on CUDA).
        timeout: seconds after which a collective that a rank does not join fails.

    Gradients are reduced in what ``LeanGRPO.reduce_dtype`` says.

    Errors: ``ValueError`` on unusable arguments, or a number of ranks that ``replicate`` does not divide.
    """

    def __init__(
        self,
        replicate: int | Literal["nodes"] = 1,
        param_dtype: Literal["bfloat16"] | None = None,
        cpu_offload: bool = False,
        sharded_checkpoints: bool = False,
        process_group_backend: str | None = None,
        timeout: float = 1800.0,
    ) -> None:
        if replicate != "nodes" and not (isinstance(replicate, int) and replicate >= 1):
            raise ValueError(f"replicate={replicate!r}: give 'nodes' or an integer of at least 1")
        if param_dtype not in (None, "bfloat16"):
            raise ValueError(f"param_dtype={param_dtype!r}: choose bfloat16, or null for the weights' own")
        if not timeout > 0:
            raise ValueError(f"timeout={timeout}: give a positive number of seconds")
        super().__init__(
            data_parallel_size=1, tensor_parallel_size=1, save_distributed_checkpoint=False,
            process_group_backend=process_group_backend, timeout=timedelta(seconds=timeout),
        )  # fmt: skip
        self.replicate, self.cpu_offload, self.sharded_checkpoints = replicate, cpu_offload, sharded_checkpoints
        self.param_dtype = None if param_dtype is None else torch.bfloat16

    # the mesh

    def setup_environment(self) -> None:
        ParallelStrategy.setup_environment(self)
        precision = self.precision_plugin.precision
        if self.param_dtype is not None and precision != "bf16-mixed":
            raise ValueError(f"param_dtype: bfloat16 under precision {precision}: set trainer.precision: bf16-mixed")
        self._setup_distributed()
        self._device_mesh = self._make_mesh()
        assert self.lightning_module is not None
        self.lightning_module._device_mesh = self._device_mesh

    def _make_mesh(self) -> DeviceMesh:
        """(shard) or (replicate, shard); ranks are numbered node by node."""
        groups = self.num_nodes if isinstance(self.replicate, str) else self.replicate
        if self.world_size % groups:
            raise ValueError(
                f"replicate={self.replicate} does not divide the {self.world_size} processes: give the number of nodes"
            )
        if groups == 1:
            return init_device_mesh(self.root_device.type, (self.world_size,), mesh_dim_names=("shard",))
        shape = (groups, self.world_size // groups)
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))

    def _get_process_group_backend(self) -> str:
        """Offloaded shards are on the CPU, where NCCL cannot sum their norms."""
        if self._process_group_backend is None and self.cpu_offload and self.root_device.type == "cuda":
            return "cpu:gloo,cuda:nccl"
        return super()._get_process_group_backend()

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    def shard(self, module: nn.Module) -> None:
        """Cast a policy to the trainer's precision and shard it in place over this strategy's ranks; a second call does
        nothing. Collective."""
        module = self.precision_plugin.convert_module(module)
        shard(module, self.device_mesh, param_dtype=self.param_dtype, cpu_offload=self.cpu_offload)

    def model_to_device(self) -> None:
        """Shards are where they belong; what is not sharded follows."""
        assert self.model is not None
        for tensor in (*self.model.parameters(), *self.model.buffers()):
            if not isinstance(tensor, DTensor):
                tensor.data = tensor.data.to(self.root_device)

    # checkpoints: of the trained part, whatever the strategy

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """As other strategies do: hooks see a resumed run in the same order everywhere."""
        return False

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The trained parameters, sharded as they are; :meth:`save_checkpoint` gathers."""
        assert self.model is not None
        return {name: p.detach() for name, p in self.model.named_parameters() if p.requires_grad}

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Sharded as it is, by the parameters' positions."""
        return Strategy.optimizer_state(self, optimizer)

    @torch.no_grad()
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Errors: ``ValueError`` on a tensor that is no parameter of the model."""
        assert self.model is not None
        parameters = dict(self.model.named_parameters())
        for name, value in checkpoint["state_dict"].items():
            if name not in parameters:
                raise ValueError(f"the checkpoint holds {name}, which the model lacks: use the run's own config.yaml")
            local(parameters[name]).copy_(local(laid_out_like(value, parameters[name])))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, saved in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            state = {
                key: {name: _laid_out(name, value, parameters[key], optimizer) for name, value in values.items()}
                for key, values in saved["state"].items()
            }
            optimizer.load_state_dict(saved | {"state": state})

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Collective. A folder gets its name once every rank's shards are on the disk."""
        if not self.sharded_checkpoints:
            whole = gathered(checkpoint, keep=self.is_global_zero)
            Strategy.save_checkpoint(self, whole, filepath, storage_options)
            return
        if storage_options is not None:
            raise ValueError(f"storage_options={storage_options!r}: checkpoints are local folders and take none")
        folder = Path(self.broadcast(str(filepath)))
        draft = folder.with_name(f".{folder.name}.draft")
        if self.is_global_zero:
            shutil.rmtree(draft, ignore_errors=True)  # what a killed run left
            draft.mkdir(parents=True)
        self.barrier()
        write_shards(checkpoint, draft, first=self.is_global_zero)
        if self.is_global_zero:
            _take_name(draft, folder)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """From a file, whole; from a folder, sharded (then collective)."""
        path = Path(self.broadcast(str(checkpoint_path)))
        return (
            read_shards(path, self.device_mesh) if path.is_dir() else Strategy.load_checkpoint(self, path, weights_only)
        )

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        assert self.model is not None
        if not is_sharded(self.model):
            raise ValueError(
                f"{type(self.lightning_module).__name__} shards nothing in configure_model: use strategy ddp for it"
            )


def _laid_out(name: str, value: Any, parameter: Tensor, optimizer: Optimizer) -> Any:
    """A saved piece of optimizer state, sharded as its parameter; counters stay as they are."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if value.shape != parameter.shape:
        raise ValueError(
            f"{type(optimizer).__name__} keeps {name} of shape {tuple(value.shape)} for a parameter of shape "
            f"{tuple(parameter.shape)}, which cannot be sharded alike: use AdamW"
        )
    return laid_out_like(value, parameter)


def _take_name(draft: Path, folder: Path) -> None:
    """In the place of a folder of that name, if there is one."""
    if folder.is_dir():
        shutil.rmtree(folder)
    draft.replace(folder)


for _name, _options in {"fsdp2": {}, "fsdp2_hybrid": {"replicate": "nodes"}}.items():
    if _name not in StrategyRegistry:
        StrategyRegistry.register(_name, FSDP2Strategy, description=f"{FSDP2Strategy.__name__}, {_options}", **_options)

"""What one trained step keeps in memory until its backward, found without computing it.

The policy's forward, the transition and its log-probability run on fake tensors (shapes, dtypes and devices, no data), and
what is still alive afterwards beside weights and inputs is what the graph holds: saved activations, and only the blocks'
inputs under activation checkpointing. Nothing is allocated, so a model that fits nowhere can be looked at; its weights may
be on the ``meta`` device. Kernels are chosen as for the device asked about, and it need not be there.

Autocast keeps its low-precision copies of the weights as long as any graph does. Two steps tell them from the rest:

    bytes(k steps) = once + k * per_step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils import stateless
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_modules.flow.denoise import ReverseProcess
from lightning_modules.policies.base import Policy
from lightning_modules.types import Conditioning


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Memory of the graphs of some rows, found by :func:`measure`."""

    per_step: int
    """bytes that each trained step of these rows adds."""
    once: int
    """bytes that all graphs of an iteration share: weights cast by autocast."""
    backbone_rows: int
    """rows through the innermost policy per step; more than the rows asked for under classifier-free guidance."""


def measure(
    policy: Policy,
    process: ReverseProcess,
    conditioning: Conditioning,
    rows: int,
    *,
    step: int = 0,
    device: torch.device | str | None = None,
    autocast: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Activations:
    """Activations of ``rows`` rows at a trained step.

    Args:
        policy: the policy; it and its weights are left alone.
        process: its reverse process; the velocity is the policy's.
        conditioning: at least one row, of which only shape and dtype matter.
        rows: N, rows of one forward with gradients.
        step: a step at which the transition adds noise.
        device: whose kernels are assumed; ``None``: the policy's (the CPU for ``meta``).
        autocast: makes the context that training runs in.
    """
    with _fake(policy, _device(policy, device)) as (mode, fake), torch.compiler.set_stance("force_eager"):
        shape = (rows, *policy.latent_shape)
        latents, after = fake(shape, torch.float32), fake(shape, torch.float32)
        level = fake((rows,), torch.float32)
        text = {name: fake((rows, *t.shape[1:]), t.dtype) for name, t in conditioning.tensors.items()}
        every = fake((rows,), torch.int64)
        live = LiveBytes([*policy.parameters(), *policy.buffers(), latents, after, level, every, *text.values()])

        def log_prob() -> Tensor:
            with mode, live:
                velocity = policy(latents, level, Conditioning(tensors=text).rows(every))
            with live:  # without the mode: the transition's table is computed, not imagined
                mean, std = process.transition.moments(latents, velocity, process.sigmas, step)
                return process.transition.log_prob(after, mean, std)

        with _Counter(policy) as counter, torch.enable_grad(), autocast():
            graphs = [log_prob()]
            one, count = live.now(), counter.rows
            graphs.append(log_prob())
            two = live.now()
        graphs.clear()
    return Activations(per_step=two - one, once=max(0, 2 * one - two), backbone_rows=count)


class LiveBytes(TorchDispatchMode):
    """Inside, keeps an eye on every tensor that an operation makes; those in ``ignored`` do not count."""

    def __init__(self, ignored: Sequence[Tensor]) -> None:
        super().__init__()
        self._ignored = {StorageWeakRef(t.untyped_storage()) for t in ignored}
        self._seen: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)
                if reference not in self._ignored:
                    self._seen[reference] = storage.nbytes()
        return made

    def now(self) -> int:
        """Bytes of the tensors made so far that something still holds."""
        self._seen = {reference: size for reference, size in self._seen.items() if not reference.expired()}
        return sum(self._seen.values())


class _Counter:
    """Counts the rows through the innermost policy's forward."""

    def __init__(self, policy: Policy) -> None:
        self._innermost = innermost(policy)
        self.rows = 0

    def __enter__(self) -> _Counter:
        def add(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.rows += len(args[0])

        self._hook = self._innermost.register_forward_pre_hook(add)
        return self

    def __exit__(self, *exception: object) -> None:
        self._hook.remove()


def innermost(policy: Policy) -> Policy:
    """The policy that holds the backbone, inside any that wrap it."""
    return [module for module in policy.modules() if isinstance(module, Policy)][-1]


@contextmanager
def _fake(policy: Policy, device: torch.device) -> Iterator[tuple[FakeTensorMode, Callable[..., Tensor]]]:
    """Inside, the policy's tensors are fake ones on ``device``. Yields the mode in which new tensors are fake as well, and
    ``fake(shape, dtype)``, which makes one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        with mode:
            return torch.empty(*shape, dtype=dtype, device=device)

    tensors = [*policy.named_parameters(remove_duplicate=False), *policy.named_buffers(remove_duplicate=False)]
    made = {id(t): fake(t.shape, t.dtype).requires_grad_(t.requires_grad) for _, t in tensors}
    with stateless._reparametrize_module(policy, {name: made[id(t)] for name, t in tensors}):
        yield mode, fake


def _device(policy: Policy, device: torch.device | str | None) -> torch.device:
    chosen = policy.device if device is None else torch.device(device)
    return torch.device("cpu") if chosen.type == "meta" else chosen

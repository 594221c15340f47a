"""The training loader: one :class:`PromptBatch` per iteration, in the sampler's order.

It holds a ``DataLoader`` but is none. Lightning re-wraps the sampler of a ``DataLoader`` in a distributed run and would
hand each rank other prompts; an iterable that is no ``DataLoader`` it passes through, whatever
``Trainer(use_distributed_sampler)`` says. Which prompts an iteration has is decided by the sampler, in the parent
process; workers only look rows up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch.utils.data import DataLoader

from datamodules.prompts import Prompt
from datamodules.sampler import PromptSampler
from lightning_modules.types import PromptBatch


class PromptLoader:
    """Iterable over the batches of the iterations that ``sampler`` deals; ``len()`` is the length of the whole run."""

    def __init__(self, prompts: Sequence[Prompt], sampler: PromptSampler, num_workers: int = 0) -> None:
        self._sampler = sampler
        self._loader = DataLoader(prompts, batch_sampler=sampler, num_workers=num_workers, collate_fn=tuple)  # pyright: ignore[reportArgumentType]

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[PromptBatch]:
        for iteration, rows in zip(range(self._sampler.start, self._sampler.iterations), self._loader, strict=True):
            yield PromptBatch(
                prompts=tuple(prompt.text for prompt in rows),
                metadata=tuple(prompt.metadata for prompt in rows),
                iteration=iteration,
            )


class ResumablePromptLoader(PromptLoader):
    """A loader whose position is somebody else's counter.

    The stream is a function of the iteration, so there is no position to keep: the loader is built to start at the
    counter, which the checkpoint has already restored. Its state in the checkpoint is the counter at that time, and
    loading it only checks that the two agree; its presence also tells Lightning that a mid-epoch resume is safe.

    Args:
        position: the number of the next iteration. ``position()`` must equal ``sampler.start`` now.
    """

    def __init__(
        self, prompts: Sequence[Prompt], sampler: PromptSampler, position: Callable[[], int], num_workers: int = 0
    ) -> None:
        super().__init__(prompts, sampler, num_workers)
        self._position = position

    def __iter__(self) -> Iterator[PromptBatch]:
        if self._position() != self._sampler.start:
            raise ValueError(
                f"the stream of {len(self)} iterations that starts at {self._sampler.start} was dealt before: make the "
                "run one epoch (trainer.max_epochs: 1) and set its length by data.init_args.iterations"
            )
        return super().__iter__()

    def state_dict(self) -> dict[str, int]:
        return {"iteration": self._position()}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        saved = state_dict["iteration"]
        if saved != self._sampler.start:
            raise ValueError(
                f"the checkpoint was written at iteration {saved} but the model's counter says {self._sampler.start}: "
                "save and restore `iteration` with the LightningModule, or start without the checkpoint"
            )

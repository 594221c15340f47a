"""What the evaluation loaders yield: every prompt of a file times n images, a slice of rows at a time.

Of several ranks, rank r takes rows r, r + R, r + 2R, ..., or whole batches of all rows in the same way: no row twice, and all
ranks yield the same number of batches, since drawing an image is a collective where the policy is sharded. Dealing rows
balances the work; dealing batches keeps their composition whatever the number of ranks, and with it the last bits of what is
computed from them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from datamodules.prompts import Prompt


@dataclass(kw_only=True)
class EvalBatch:
    """n rows of an evaluation; one row is one image to draw. The ids key its noise, so the image does not depend on
    how the rows were cut into batches.

    Not frozen only because Lightning's precision plugins rebuild every batch and refuse frozen dataclasses.
    """

    prompts: tuple[str, ...]
    """[n] text."""
    metadata: tuple[dict[str, Any], ...]
    """[n] the prompt's row in its file."""
    prompt_index: Tensor
    """[n] int64, the prompt's position in its file, 0-based."""
    image_index: Tensor
    """[n] int64, which of the prompt's images, 0..images_per_prompt - 1."""
    surplus: bool = False
    """Whether the row is another rank's, handed out because none is left for this one: to be drawn where ranks must keep
    step, and never counted."""

    def __len__(self) -> int:
        return len(self.prompts)


class EvalLoader:
    """Iterable of :class:`EvalBatch`: each (prompt, image) row exactly once over all ranks, prompt by prompt,
    ``batch_size`` rows at a time, the last batch maybe shorter.

    A plain iterable, not a ``DataLoader``: there is nothing to fetch, and Lightning leaves it as it is.

    Args:
        prompts: of one file, in its order.
        images_per_prompt: >= 1.
        batch_size: rows per batch, >= 1.
        indices: the prompts to use, as positions in ``prompts``; all by default. ``prompt_index`` keeps the position.
        rank, ranks: which share of the rows this process draws.
        whole_batches: deal batches instead of rows.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        images_per_prompt: int,
        batch_size: int,
        indices: Sequence[int] | None = None,
        *,
        rank: int = 0,
        ranks: int = 1,
        whole_batches: bool = False,
    ) -> None:
        for name, value in (("images_per_prompt", images_per_prompt), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value}: give an integer of at least 1")
        chosen = range(len(prompts)) if indices is None else indices
        self._prompts = prompts
        self._all = [(prompt, image) for prompt in chosen for image in range(images_per_prompt)]
        if whole_batches:
            batches = _cut(self._all, batch_size)
            self._mine, self._length = batches[rank::ranks], -(-len(batches) // ranks)
        else:
            busiest = -(-len(self._all) // ranks)
            self._mine, self._length = _cut(self._all[rank::ranks], batch_size), -(-busiest // batch_size)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[EvalBatch]:
        for number in range(self._length):
            surplus = number >= len(self._mine)
            rows = self._all[:1] if surplus else self._mine[number]
            prompts = [self._prompts[index] for index, _ in rows]
            yield EvalBatch(
                surplus=surplus,
                prompts=tuple(prompt.text for prompt in prompts),
                metadata=tuple(prompt.metadata for prompt in prompts),
                prompt_index=torch.tensor([index for index, _ in rows]),
                image_index=torch.tensor([image for _, image in rows]),
            )


def _cut(rows: list[tuple[int, int]], size: int) -> list[list[tuple[int, int]]]:
    return [rows[first : first + size] for first in range(0, len(rows), size)]

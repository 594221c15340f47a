"""Endless (images, captions) batches of the shapes world, drawn on the fly, for supervised pretraining."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TypedDict

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from datamodules.shapes_world import TAGS, pretraining_prompts, render


class ShapesBatch(TypedDict):
    """What the datamodule yields."""

    images: Tensor
    """``[N, 3, 32, 32]`` float32 in [0, 1]."""
    captions: list[str]
    """[N] text; each describes its image exactly."""


class ShapesScenes(IterableDataset):
    """Batches ``offset, offset + stride, ...`` of an endless sequence. A batch depends on (seed, its index) alone, so
    the sequence is the same for any number of workers, and ranks that take turns see different scenes."""

    def __init__(self, *, batch_size: int, seed: int, offset: int = 0, stride: int = 1) -> None:
        self.batch_size, self.seed, self.offset, self.stride = batch_size, seed, offset, stride
        self.prompts = pretraining_prompts()

    def __iter__(self) -> Iterator[ShapesBatch]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        for turn in itertools.count(first, step):
            yield self.batch(self.offset + turn * self.stride)

    def batch(self, index: int) -> ShapesBatch:
        """Batch ``index``: each caption's category is uniform, then its prompt within the category."""
        # the CPU generator reads 32 bits: seeds start far apart on that circle of batches (2**32 over the golden ratio)
        generator = torch.Generator().manual_seed((index + self.seed * 0x9E3779B1) % 2**32)
        tags = torch.randint(len(TAGS), (self.batch_size,), generator=generator).tolist()
        rows = [self.prompts[TAGS[tag]] for tag in tags]
        chosen = [row[int(torch.randint(len(row), (), generator=generator))] for row in rows]
        images = torch.stack([render(metadata, generator) for metadata in chosen])
        return ShapesBatch(images=images, captions=[metadata["prompt"] for metadata in chosen])


class ShapesData(pl.LightningDataModule):
    """Pretraining data. The held-out prompts never occur in it.

    Args:
        batch_size: images a batch and rank.
        seed: key of all randomness.
        num_workers: processes that draw; the data are the same for any number.
    """

    def __init__(self, *, batch_size: int = 64, seed: int = 0, num_workers: int = 0) -> None:
        super().__init__()
        if batch_size < 1:
            raise ValueError(f"batch_size {batch_size}: give at least 1")
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed {seed}: give one from 0 to 2**31 - 1")
        self.batch_size, self.seed, self.num_workers = batch_size, seed, num_workers

    def train_dataloader(self) -> DataLoader:
        offset, stride = (self.trainer.global_rank, self.trainer.world_size) if self.trainer else (0, 1)
        scenes = ShapesScenes(batch_size=self.batch_size, seed=self.seed, offset=offset, stride=stride)
        return DataLoader(scenes, batch_size=None, num_workers=self.num_workers)

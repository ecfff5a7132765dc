"""Microbatches in the order of a data set, from where a run stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from zerobubble.data.corpus import Sample
from zerobubble.errors import UserError
from zerobubble.model.batch import Batch


class Loader:
    """Samples one after the other, as Megatron's sequential sampler, in microbatches.

    `num_workers` processes read ahead; 0: the caller's own process reads.
    """

    def __init__(
        self,
        dataset: Dataset[Sample],
        *,
        micro_batch_size: int,
        consumed_samples: int = 0,
        num_workers: int = 0,
    ) -> None:
        self._size = len(dataset)  # type: ignore[arg-type]
        self._rows = micro_batch_size
        self._next = consumed_samples
        self._batches: Iterator[Any] = iter(
            DataLoader(
                dataset,
                batch_sampler=_Sequential(consumed_samples, self._size, micro_batch_size),
                num_workers=num_workers,
            )
        )

    def next(self, count: int) -> list[Batch]:
        """The next `count` microbatches. Raises UserError where the data ends before."""
        end = self._next + count * self._rows
        if end > self._size:
            raise UserError(f"the data has {self._size} samples, {end} are needed; use more data")
        self._next = end
        return [
            Batch(
                tokens=rows["tokens"],
                labels=rows["labels"],
                loss_mask=rows["loss_mask"].to(torch.float32),
            )
            for rows in (next(self._batches) for _ in range(count))
        ]


class _Sequential:
    """Row numbers of every whole microbatch from `first` on."""

    def __init__(self, first: int, size: int, rows: int) -> None:
        self._first, self._size, self._rows = first, size, rows

    def __len__(self) -> int:
        return max(0, (self._size - self._first) // self._rows)

    def __iter__(self) -> Iterator[list[int]]:
        for start in range(self._first, self._size - self._rows + 1, self._rows):
            yield list(range(start, start + self._rows))

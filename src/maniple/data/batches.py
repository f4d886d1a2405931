"""Batches of one data-parallel rank, in an order that a restart can pick up and that no layout changes.

Sample i of the dataset belongs to optimizer step i // global_batch_size, whatever the number of ranks. Inside a step,
micro-step m covers micro_batch_size x data_parallel_size consecutive samples, of which rank r takes the r-th
micro_batch_size: what Megatron-LM's sequential pretraining sampler does. (Datasets shuffle themselves.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")


class ConsecutiveSampler(Sampler[list[int]]):
    """Indices of each micro-batch of one rank; a last incomplete micro-step is left out on every rank alike."""

    def __init__(self, num_samples: int, start: int, micro_batch_size: int, rank: int, size: int) -> None:
        self._first = range(start, num_samples - micro_batch_size * size + 1, micro_batch_size * size)
        self._shift, self._count = rank * micro_batch_size, micro_batch_size

    def __len__(self) -> int:
        return len(self._first)

    def __iter__(self) -> Iterator[list[int]]:
        for first in self._first:
            yield list(range(first + self._shift, first + self._shift + self._count))


def iterate(
    dataset: Dataset,
    *,
    start_sample: int,
    micro_batch_size: int,
    data_parallel_rank: int,
    data_parallel_size: int,
    global_batch_size: int,
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Iterator[dict[str, torch.Tensor]]:
    """Micro-batches from `start_sample` (= steps done x global_batch_size) to the end of `dataset`.

    Each is a dict of tensors [micro_batch_size, sequence_length]: tokens, labels, position_ids (int64) and loss_mask
    (float32). num_workers: loader processes; 0 reads in this one. Neither torch's nor NumPy's global random state is
    touched. Raises ValueError for sizes that do not fit together.
    """
    step = micro_batch_size * data_parallel_size
    if global_batch_size % step:
        raise ValueError(
            f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} x "
            f"data-parallel size {data_parallel_size}"
        )
    if start_sample % global_batch_size:
        raise ValueError(f"start_sample {start_sample} is not a multiple of global_batch_size {global_batch_size}")
    if not 0 <= data_parallel_rank < data_parallel_size:
        raise ValueError(f"data-parallel rank {data_parallel_rank} is not below {data_parallel_size}")
    sampler = ConsecutiveSampler(
        len(cast(Sized, dataset)), start_sample, micro_batch_size, data_parallel_rank, data_parallel_size
    )
    loader = DataLoader(
        dataset,
        batch_sampler=sampler,
        num_workers=num_workers,
        collate_fn=_collate,
        pin_memory=pin_memory,
        # Else every new iterator would draw its seed from the global generator, and a validation in the middle of a
        # run would change the dropout after it.
        generator=torch.Generator().manual_seed(0),
    )
    return iter(loader)


def _collate(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([sample[key] for sample in samples]) for key in _KEYS}

"""Batches of one data-parallel rank, in an order that a restart can pick up and that no layout changes.

A step reads the next global_batch_size samples of the dataset, whatever the number of ranks. Inside a step, micro-step
m covers micro_batch_size x data_parallel_size consecutive samples, of which rank r takes the r-th micro_batch_size, as
Megatron-LM's sequential pretraining sampler has it. (Datasets shuffle themselves.)
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import traceback
from collections.abc import Iterator, Sized
from dataclasses import dataclass
from multiprocessing.util import Finalize
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from maniple.errors import UserError

# Loader processes hand tensors over through a socket whose path, with its end, has to fit in `sockaddr_un.sun_path`:
# `pymp-XXXXXXXX/listener-XXXXXXXX` (multiprocessing) in the folder for temporary files.
_LONGEST_TEMPORARY = 107 - len("/pymp-XXXXXXXX/listener-XXXXXXXX")
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


class Batches:
    """The micro-batches of one rank; each `iter` starts over at `start_sample` and ends with `dataset`.

    Each is a dict of tensors [micro_batch_size, sequence_length]: tokens, labels, position_ids (int64) and loss_mask
    (float32). num_workers: loader processes, kept from one iteration to the next; 0 reads in this one. Neither torch's
    nor NumPy's global random state is touched. Raises ValueError for sizes that do not fit together; iterating raises
    UserError for data that cannot be read, in the same words whichever process read it, and RuntimeError, in one line,
    for a loader process that died. Raises UserError for loader processes where the path of temporary files is too long.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        start_sample: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        global_batch_size: int,
        num_workers: int = 0,
        pin_memory: bool = False,
    ) -> None:
        step = micro_batch_size * data_parallel_size
        if global_batch_size % step:
            raise ValueError(
                f"global_batch_size {global_batch_size} is not a multiple of micro_batch_size {micro_batch_size} x "
                f"data-parallel size {data_parallel_size}"
            )
        if start_sample < 0:
            raise ValueError(f"start_sample {start_sample} is negative")
        if not 0 <= data_parallel_rank < data_parallel_size:
            raise ValueError(f"data-parallel rank {data_parallel_rank} is not below {data_parallel_size}")
        if num_workers:
            _check_temporary_folder()
            Finalize(None, _end_loaders, exitpriority=1)
        sampler = ConsecutiveSampler(
            len(cast(Sized, dataset)), start_sample, micro_batch_size, data_parallel_rank, data_parallel_size
        )
        self._loader = DataLoader(
            _Reporting(dataset) if num_workers else dataset,
            batch_sampler=sampler,
            num_workers=num_workers,
            collate_fn=_collate,
            pin_memory=pin_memory,
            persistent_workers=num_workers > 0,
            worker_init_fn=_ignore_signals,
            # Else every new iterator would draw its seed from the global generator, and a validation in the middle of
            # a run would change the dropout after it.
            generator=torch.Generator().manual_seed(0),
        )

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        batches = iter(self._loader)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            except RuntimeError as error:  # what torch raises for a worker that is gone
                if "DataLoader worker" not in str(error):
                    raise
                raise _died(" ".join(str(error).split())) from None
            except (ConnectionError, EOFError) as error:  # it died while it was handing a batch over
                raise _died(f"exited unexpectedly: {type(error).__name__}") from None
            if isinstance(batch, _Failure):
                raise batch.error()
            yield batch


def _died(what: str) -> RuntimeError:
    return RuntimeError(f"data: a loader process died ({what}): out of memory? lower data.num_workers")


def _check_temporary_folder() -> None:
    folder = tempfile.gettempdir()
    if (length := len(os.fsencode(folder))) > _LONGEST_TEMPORARY:
        raise UserError(
            f"data.num_workers: {folder}, for temporary files, has {length} bytes, and loader processes' sockets leave "
            f"room for {_LONGEST_TEMPORARY}: set TMPDIR to a shorter path, or data.num_workers=0"
        )


def iterate(dataset: Dataset, **options: Any) -> Iterator[dict[str, torch.Tensor]]:
    """One pass over `Batches(dataset, **options)`."""
    return iter(Batches(dataset, **options))


@dataclass(frozen=True)
class _Failure:
    """What went wrong in a loader process. As a value: torch would raise it with its traceback for a message."""

    message: str
    is_users: bool
    traceback: str

    def error(self) -> Exception:
        if self.is_users:
            return UserError(self.message)
        error = RuntimeError(f"data: {self.message}")
        error.add_note(self.traceback)
        return error


class _Reporting(Dataset):
    """A dataset whose faults come back as values."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __getitems__(self, indices: list[int]) -> list[dict[str, torch.Tensor]] | _Failure:
        samples = []
        for index in indices:
            try:
                samples.append(self.dataset[index])
            except UserError as error:
                return _Failure(str(error), True, "")
            except Exception as error:
                return _Failure(f"sample {index}: {type(error).__name__}: {error}", False, traceback.format_exc())
        return samples


def _ignore_signals(worker: int) -> None:
    """SIGTERM and Ctrl-C ask a job to save and stop, and reach all its processes: a loader ends with its trainer."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def _end_loaders() -> None:
    """At the end of this process, where multiprocessing would ask its daemons to end by SIGTERM, which loaders ignore,
    and wait for them: one whose iterator a traceback, say, still holds would keep the process for ever."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def _collate(samples: list[dict[str, torch.Tensor]] | _Failure) -> dict[str, torch.Tensor] | _Failure:
    if isinstance(samples, _Failure):
        return samples
    return {key: torch.stack([sample[key] for sample in samples]) for key in _KEYS}

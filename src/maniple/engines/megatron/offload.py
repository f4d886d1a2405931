"""States of the optimizer in host memory: which they are, the memory, and their way through the device.

An update brings them to the device a chunk at a time and takes them back, each way in a stream of its own, so that
both directions of the link are busy while the kernel runs. What is computed is what `maniple.kernels.adamw` computes of
states on the device, element by element, and so are its bits. On a CPU the way is the same and memory is not pinned.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from maniple.errors import UserError
from maniple.hardware.units import binary_size
from maniple.kernels.adamw import Shard, adamw_

log = logging.getLogger("maniple")

# Elements of a chunk, and chunks that are on the device at once: one that comes, one that is updated, one that goes.
CHUNK, SLOTS = 2**23, 3


class HostStates:
    """The parameters whose states are in host memory: `fraction` of all bytes, or what whole parameters are more. The
    largest come first, and those of `sizes` in order among equals; who would be too much is left out, and the smallest
    of these at last fills up. sizes: bytes of a parameter's states, by parameter.

    `zeros_like` makes the states; on a GPU their memory is pinned as long as this object lives. Raises UserError where
    this machine has not so much, for as many ranks as it has.
    """

    def __init__(self, fraction: float = 0.0, sizes: dict[torch.Tensor, int] | None = None) -> None:
        sizes = sizes or {}
        every = sum(sizes.values())
        wanted = int(fraction * every)
        self.fraction, self.total = fraction, 0
        self._chosen: set[torch.Tensor] = set()
        left_out: list[torch.Tensor] = []
        for weight in sorted(sizes, key=lambda weight: -sizes[weight]):
            if self.total + sizes[weight] > wanted:
                left_out.append(weight)
                continue
            self._chosen.add(weight)
            self.total += sizes[weight]
        if self.total < wanted:
            self._chosen.add(left_out[-1])
            self.total += sizes[left_out[-1]]
        self._memory: list[mmap.mmap] = []
        self._pinned: list[int] = []
        # not at the interpreter's end, when CUDA is no more
        weakref.finalize(self, _unpin, self._pinned).atexit = False
        if self._chosen and not all(weight.is_meta for weight in self._chosen):
            ranks, there = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _physical_bytes()
            if ranks * self.total > there:
                for_all = f" for its {ranks} ranks" if ranks > 1 else ""
                raise self._refused(f"this machine has {binary_size(there)}{for_all}")
            log.info(
                "optimizer.offload_fraction %g: %s of %s of this rank's states are in host memory",
                *(fraction, binary_size(self.total), binary_size(every)),
            )

    def __contains__(self, weight: torch.Tensor) -> bool:
        return weight in self._chosen

    def zeros_like(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """In host memory, and pinned beside a weight on a GPU. Raises UserError where that cannot be had."""
        if not weight.is_cuda:
            return torch.zeros(weight.shape, dtype=dtype, device="cpu")
        # torch's own pinned memory comes in powers of two, up to twice of what is asked for
        size = weight.numel() * dtype.itemsize
        try:
            memory = mmap.mmap(-1, size)
        except OSError as error:
            raise self._refused(error.strerror or str(error)) from None
        tensor = torch.frombuffer(memory, dtype=dtype)
        failed = int(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), size, 0))
        if failed:
            raise self._refused(f"CUDA pins no more: {torch.cuda.CudaError(failed)}")
        self._memory.append(memory)
        self._pinned.append(tensor.data_ptr())
        return tensor.view(weight.shape)

    def _refused(self, why: str) -> UserError:
        return UserError(
            f"optimizer.offload_fraction {self.fraction:g} keeps {binary_size(self.total)} ({self.total:,} bytes) of "
            f"this rank in pinned host memory, and cannot: {why}; set a smaller one"
        )


def update(shards: Iterable[tuple[Shard, dict[str, Any]]]) -> None:
    """`adamw_` of each shard with its arguments, where moments, and the main parameter if there is a model copy beside
    it, are in host memory. When it returns they are what they shall be: whoever reads them need not wait."""
    shards = list(shards)
    if not shards:
        return
    longest = min(CHUNK, max(shard.grad.numel() for shard, _ in shards))
    dtypes = {name: getattr(shard, name).dtype for shard, _ in shards for name in _hosted(shard)}
    device = shards[0][0].grad.device
    slots = [{n: torch.empty(longest, dtype=d, device=device) for n, d in dtypes.items()} for _ in range(SLOTS)]
    here, inward, outward = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    inward.wait_stream(here)  # on which the slots' memory may still be in use
    gone: list[Any] = [None] * SLOTS
    for (shard, how), slot in zip(_chunks(shards), cycle(range(SLOTS))):
        host = {name: getattr(shard, name) for name in _hosted(shard)}
        with torch.cuda.stream(inward):
            if gone[slot] is not None:
                inward.wait_event(gone[slot])
            there = {name: slots[slot][name][: tensor.numel()] for name, tensor in host.items()}
            for name, tensor in host.items():
                there[name].copy_(tensor, non_blocking=True)
        here.wait_stream(inward)
        adamw_([replace(shard, **there)], **how)
        outward.wait_stream(here)
        with torch.cuda.stream(outward):
            for name, tensor in host.items():
                tensor.copy_(there[name], non_blocking=True)
        gone[slot] = outward.record_event()
    outward.synchronize()


def _hosted(shard: Shard) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq") if shard.model is None else ("main", "exp_avg", "exp_avg_sq")


def _chunks(shards: list[tuple[Shard, dict[str, Any]]]) -> Iterator[tuple[Shard, dict[str, Any]]]:
    for shard, how in shards:
        tensors = {name: getattr(shard, name) for name in ("grad", "main", "exp_avg", "exp_avg_sq", "model")}
        flat = {name: tensor.view(-1) for name, tensor in tensors.items() if tensor is not None}
        for begin in range(0, shard.grad.numel(), CHUNK):
            part = {name: tensor[begin : begin + CHUNK] for name, tensor in flat.items()}
            yield replace(shard, **part, first=shard.first + begin), how


def _physical_bytes() -> int:
    """Of this machine, or of the container that this process is in."""
    size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return size if said == "max" else min(size, int(said))


def _unpin(addresses: list[int]) -> None:
    for address in addresses:
        torch.cuda.cudart().cudaHostUnregister(address)

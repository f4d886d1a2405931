"""Counts the bytes that tensors hold while a program runs, on any device and under fake tensors."""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageMeter(TorchDispatchMode):
    """`live` and `peak` bytes of all storages that operations under this mode have made and that still exist.

    A storage is counted once however many tensors view it, and one that an operation was given and only views, such as
    a parameter from before this mode, not at all. `rounding` is the allocator's unit (512 bytes for CUDA's
    caching allocator). Memory that kernels use inside one operation is not seen.
    """

    def __init__(self, rounding: int = 512) -> None:
        super().__init__()
        self.rounding = rounding
        self.live = 0
        self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        new = [storage for storage in _storages(out) if storage._cdata not in self._known]
        if new:
            given = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in new:
                if storage._cdata not in given:
                    self._see(storage)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._known:  # several results of one operation view it
            return
        size = -(-storage.nbytes() // self.rounding) * self.rounding
        self._known[key] = weakref.ref(storage, partial(self._forget, key, size))
        self.live += size
        self.peak = max(self.peak, self.live)

    def _forget(self, key: int, size: int, _: weakref.ref) -> None:
        del self._known[key]
        self.live -= size

    def leave_out(self, tensors: list[torch.Tensor]) -> None:
        """These are in another memory, though they were made here: they count no more, and the peak begins anew."""
        for storage in {storage._cdata: storage for storage in _storages(tensors)}.values():
            if self._known.pop(storage._cdata, None) is not None:
                self.live -= -(-storage.nbytes() // self.rounding) * self.rounding
        self.reset_peak()

    def reset_peak(self) -> None:
        self.peak = self.live


def _storages(value: Any) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]

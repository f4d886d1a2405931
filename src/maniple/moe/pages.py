"""What experts keep for backward, in pages as many as the rows that came.

A static buffer has S slots, whatever came: kept as it is until backward, every layer's costs S rows. Here the tensors
that autograd saves inside `ActivationPages.keeping` are copied to pages of one pool as far as they are used, and their
buffers are free for the next layer; before backward reads one it is copied back. Pages are taken and freed on the
device, in any order of layers and micro-batches, and are freed when autograd lets go of what it saved.

The pool's size is a stated factor of what balanced routing needs, which the host counts while the first pass runs; that
pass has no pages and is thrown away. So is any pass that wants more pages than there are (`most`); after `grow` it is
run again.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from maniple.kernels import forgotten
from maniple.kernels.pages import Pool, bring, give, keep, new_pool, pages_of
from maniple.kernels.quantize.quantized import padded_size

PAGE_BYTES = 1 << 16
_PADDED = 128  # a quantized tensor's groups of columns start at multiples of it
_HEADROOM = 10  # a tenth beyond what was wanted


@dataclass(frozen=True)
class _Front:
    """A saved tensor as `[L, W]`, each line of which is used up to `used * unit` elements."""

    lines_LW: torch.Tensor
    used: torch.Tensor
    unit: int
    balanced: int  # of `used`, where routing is balanced
    turned: bool  # the tensor is the transpose of what lies in memory


class ActivationPages:
    """One pool for all layers of this process, made on the device where it is first needed. Not for several streams."""

    def __init__(self, factor: float, *, page_bytes: int = PAGE_BYTES, kernels: str | None = None) -> None:
        if not factor >= 1:
            raise ValueError(f"pages are for at least the balanced load: {factor} is less than 1")
        self.factor = factor
        self.page_bytes = page_bytes
        self.kernels = kernels
        self.pool: Pool | None = None
        self.balanced_now = self.balanced_most = 0  # pages that balanced routing would hold

    @property
    def pages(self) -> int:
        return 0 if self.pool is None else self.pool.pages

    @property
    def most(self) -> torch.Tensor | None:
        """int64 [1] on the device: the most pages that were wanted at once since `reset`. None before the first."""
        return None if self.pool is None else self.pool.most

    def reset(self) -> None:
        if self.pool is not None:
            self.pool.most.copy_(self.pool.state[-2:-1])  # those that are held now

    def grow(self, wanted: int) -> None:
        """A new pool for `wanted` pages and some more, and for the factor of the balanced load."""
        assert self.pool is not None
        device = self.pool.data.device
        pages = max(wanted + -(-wanted // _HEADROOM), math.ceil(self.factor * self.balanced_most))
        self.pool = None  # its memory goes back before the new one's is asked for, once no one holds a page
        self.pool = new_pool(pages, self.page_bytes, device)

    @contextlib.contextmanager
    def keeping(self, ends_G: torch.Tensor, slots: int, balanced: int) -> Iterator[None]:
        """Inside, tensors of `slots` expert-sorted rows, of which `ends_G` says how many came, are kept in pages.

        balanced: rows that come where routing is balanced. Kept are matrices whose rows are the slots (or whose columns
        are, where they lie in memory row by row of the slots), and a quantized tensor's transpose with its scales; any
        other tensor, one that might be either, and one that is smaller than a page stays as it is.
        """
        if not torch.is_grad_enabled() or not slots:
            yield
            return
        fronts = _Fronts(ends_G, slots, balanced)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, fronts), _unpack):
            yield

    def _pack(self, fronts: _Fronts, x: torch.Tensor) -> Any:
        recipe: Any = forgotten.pack(x)
        if recipe is not x:  # it will be computed again, and is kept nowhere
            return recipe
        front = fronts.of(x)
        small = x.numel() * x.element_size() < self.page_bytes
        return x if small or front is None else _Kept(self, x, front)


class _Fronts:
    """Which tensors have something to do with the slots, and how much of them is used."""

    def __init__(self, ends_G: torch.Tensor, slots: int, balanced: int) -> None:
        self.ends_G, self.slots, self.balanced = ends_G, slots, balanced
        self.padded = padded_size(slots, ends_G.shape[0])
        self._columns: torch.Tensor | None = None

    def of(self, x: torch.Tensor) -> _Front | None:
        if x.dim() != 2 or not x.numel() or (x.is_leaf and x.requires_grad):
            return None
        if turned := not x.is_contiguous():
            x = x.t()
        if not x.is_contiguous() or not (x.dtype.is_floating_point or x.dtype == torch.uint8):
            return None
        rows, unit = x.shape[0] == self.slots, self._unit(x, turned)
        if rows == bool(unit):
            return None
        if rows:
            return _Front(x.detach().view(1, -1), self.ends_G[-1:], x.shape[1], self.balanced, turned)
        balanced = min(self.padded // _PADDED, self.balanced // _PADDED + self.ends_G.shape[0])
        lines_LW = x.detach().view(1, -1) if turned else x.detach()
        return _Front(lines_LW, self._blocks(), unit, balanced, turned)

    def _unit(self, x: torch.Tensor, turned: bool) -> int:
        """Elements of a line for each 128 padded slots; 0 if there are none for them. Block scales lie turned."""
        blocks = self.padded // _PADDED
        if turned:
            lines = {torch.float32: 1, torch.uint8: 4}.get(x.dtype, 0)
            return lines * x.shape[1] if x.shape[0] == lines * blocks else 0
        return _PADDED if x.element_size() == 1 and x.shape[1] == _PADDED * blocks else 0

    def _blocks(self) -> torch.Tensor:
        """How many times 128 padded slots are used, int64 [1]."""
        if self._columns is None:
            ends_G = self.ends_G.to(torch.int64)
            sizes_G = torch.diff(ends_G, prepend=ends_G.new_zeros(1))
            self._columns = ((sizes_G + _PADDED - 1) // _PADDED).sum(0, keepdim=True)
        return self._columns


class _Kept:
    """Stands for a tensor that autograd saved. Its pages are freed with it."""

    def __init__(self, owner: ActivationPages, x: torch.Tensor, front: _Front) -> None:
        lines_LW = front.lines_LW
        self.shape, self.dtype, self.device = lines_LW.shape, x.dtype, x.device
        self.in_memory = x.shape[::-1] if front.turned else x.shape
        self.turned, self.used, self.unit, self.owner = front.turned, front.used, front.unit, owner
        size = self.shape[0] * front.balanced * front.unit * x.element_size()
        self.balanced = pages_of(size, owner.page_bytes)
        self.pool: Pool | None = None
        owner.balanced_now += self.balanced
        owner.balanced_most = max(owner.balanced_most, owner.balanced_now)
        if x.is_meta:  # a run without values: its share of the pool
            share = math.ceil(owner.factor * self.balanced)
            self.table = torch.empty(share * owner.page_bytes, dtype=torch.uint8, device="meta")
            return
        if owner.pool is None:
            owner.pool = new_pool(0, owner.page_bytes, x.device)
        self.table = keep(owner.pool, lines_LW, self.used, self.unit, kernels=owner.kernels)
        self.pool = owner.pool

    def tensor(self) -> torch.Tensor:
        out_LW = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self.pool is not None:
            bring(self.pool, self.table, out_LW, self.used, self.unit, kernels=self.owner.kernels)
        out = out_LW.view(self.in_memory)
        return out.t() if self.turned else out

    def __del__(self) -> None:
        if sys.is_finalizing():
            return
        self.owner.balanced_now -= self.balanced
        if self.pool is not None:
            give(self.pool, self.table, kernels=self.owner.kernels)


def _unpack(saved: Any) -> torch.Tensor:
    return saved.tensor() if isinstance(saved, _Kept) else forgotten.unpack(saved)

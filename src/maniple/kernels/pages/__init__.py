"""Pages: buffers of which the device alone knows how much is used, kept for later in no more memory than that.

A pool holds pages of one size. `keep` takes as many as the used part of a buffer needs and copies it there; `bring`
copies it back; `give` frees the pages. All three only launch work, on one stream; which pages and how many is decided
on the device. Where pages run out nothing breaks: what had none comes back as zeros, and the pool's state says how many
would have been needed.

An implementation is an object with the functions of `reference.py`: `take`, `give`, `store`, `load`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maniple.kernels import chips, registry
from maniple.kernels.pages import reference

__all__ = ["Pool", "bring", "give", "keep", "new_pool", "pages_of"]

_triton = registry.LazyModule("maniple.kernels.pages.triton")
registry.register("pages", "reference", {"bf16"}, registry.ANY_DEVICE, reference)
registry.register("pages", "triton", {"bf16"}, {"cuda"}, _triton, preference=1, reason_unavailable=chips.no_triton)

_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}


@dataclass(frozen=True)
class Pool:
    """P pages. Pages are numbered, and free ones stand in a ring, so that they may come back in any order."""

    data: torch.Tensor  # uint8 [P + 1, bytes]: the last is no one's
    ring_P: torch.Tensor  # int32, the free ones from `state[0]` on
    state: torch.Tensor  # int64 [4]: first free, how many are free; how many are wanted now, and the most ever

    @property
    def pages(self) -> int:
        return self.data.shape[0] - 1

    @property
    def page_bytes(self) -> int:
        return self.data.shape[1]

    @property
    def most(self) -> torch.Tensor:
        """int64 [1]: the most pages that were wanted at once; more than there are if pages ran out."""
        return self.state[reference.MOST :]


def new_pool(pages: int, page_bytes: int, device: torch.device | str) -> Pool:
    """Raises ValueError for pages that are not a multiple of 16 bytes."""
    if page_bytes <= 0 or page_bytes % 16:
        raise ValueError(f"a page of {page_bytes} bytes is not a multiple of 16")
    state = torch.zeros(4, dtype=torch.int64, device=device)
    state[reference.FREE] = pages
    return Pool(
        torch.empty(pages + 1, page_bytes, dtype=torch.uint8, device=device),
        torch.arange(max(pages, 1), dtype=torch.int32, device=device),
        state,
    )


def pages_of(pool_bytes: int, page_bytes: int) -> int:
    """Pages that so many bytes need."""
    return -(-pool_bytes // page_bytes)


def keep(pool: Pool, x_LW: torch.Tensor, used: torch.Tensor, unit: int, *, kernels: str | None = None) -> torch.Tensor:
    """Copies the first `used * unit` elements of each line to pages; the table, int32, that `bring` and `give` need.

    x_LW: `[L, W]`, contiguous, any dtype. used: int32 or int64 `[1]` on the device, `used * unit <= W`. Where L is 1
    up to a page behind the used part may be copied too. Raises ValueError for x that is not contiguous or not 2D.
    """
    words_LW, unit = _words(x_LW, unit)
    implementation = registry.use("pages", "bf16", x_LW.device.type, kernels)
    page = pool.page_bytes // words_LW.element_size()
    most = pages_of(words_LW.numel(), page)
    table = implementation.take(pool.ring_P, pool.state, used, words_LW.shape[0] * unit, page, most)
    implementation.store(pool.data.view(words_LW.dtype), words_LW, used, unit, table)
    return table


def bring(
    pool: Pool, table: torch.Tensor, out_LW: torch.Tensor, used: torch.Tensor, unit: int, *, kernels: str | None = None
) -> None:
    """Writes what `keep` copied to `out_LW`, whose shape, dtype and memory format are x's; the rest is undefined."""
    words_LW, unit = _words(out_LW, unit)
    implementation = registry.use("pages", "bf16", out_LW.device.type, kernels)
    implementation.load(pool.data.view(words_LW.dtype), words_LW, used, unit, table)


def give(pool: Pool, table: torch.Tensor, *, kernels: str | None = None) -> None:
    """Frees the pages of a table, once."""
    registry.use("pages", "bf16", table.device.type, kernels).give(pool.ring_P, pool.state, table)


def _words(x_LW: torch.Tensor, unit: int) -> tuple[torch.Tensor, int]:
    """The lines as integers, the widest that fit, and the unit in them."""
    if x_LW.dim() != 2 or not x_LW.is_contiguous():
        raise ValueError(f"pages keep contiguous [lines, elements], not {list(x_LW.shape)} strided {x_LW.stride()}")
    size = x_LW.element_size()
    starts = x_LW.storage_offset() * size, x_LW.shape[1] * size, unit * size
    width = next(width for width in _WORDS if all(start % width == 0 for start in starts))
    return x_LW.view(torch.uint8).view(_WORDS[width]), unit * size // width

"""The permutation kernels: Triton's language alone, no torch, so that another framework can launch them.

Sorting is a counting sort in four passes without atomics. N choices are cut into chunks; a choice's bin is its expert,
or E where it is of none.

1. `rank_kernel`: how many choices of the same bin come before each in its chunk; each chunk's count of every bin.
2. `scan_kernel`: those counts become the number of choices of the bin in earlier chunks; the totals of the bins.
3. `starts_kernel`: the first slot of each bin, and the ends of the experts.
4. `place_kernel`: slot = start of the bin + choices in earlier chunks + rank in the chunk.

The way back from rows to tokens is the grouped GEMM's `gather_sum_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LATER = tl.constexpr(1 << 16)  # counts a choice that is not earlier, above those that are: a chunk is shorter


@triton.jit
def load_bins(ids_ptr, numbers, N, E):
    """int32 bins of the choices with these numbers; past N one that no choice has."""
    ids = tl.load(ids_ptr + numbers, mask=numbers < N, other=0)
    bins = tl.where((ids >= 0) & (ids < E), ids, E).to(tl.int32)
    return tl.where(numbers < N, bins, E + 1)


@triton.jit(do_not_specialize=["N"])
def rank_kernel(ids_ptr, ranks_ptr, tallies_ptr, N, E, CHUNK: tl.constexpr, COLUMNS: tl.constexpr):
    """ranks int32 `[N]`; tallies int32 `[chunks, E + 1]`, zero before: a bin's last choice in the chunk writes it."""
    first = tl.program_id(0) * CHUNK
    mine = first + tl.arange(0, CHUNK)
    my_bins = load_bins(ids_ptr, mine, N, E)
    counted = tl.zeros((CHUNK, COLUMNS), dtype=tl.int32)
    for c0 in range(0, CHUNK, COLUMNS):
        others = first + c0 + tl.arange(0, COLUMNS)
        same = my_bins[:, None] == load_bins(ids_ptr, others, N, E)[None, :]
        counted += tl.where(same, tl.where(others[None, :] < mine[:, None], 1, _LATER), 0)
    total = tl.sum(counted, axis=1)
    ranks = total & (_LATER - 1)
    tl.store(ranks_ptr + mine, ranks, mask=mine < N)
    last = (total >> 16) == 1  # itself
    tallies = tallies_ptr + tl.program_id(0).to(tl.int64) * (E + 1) + my_bins
    tl.store(tallies, ranks + 1, mask=(mine < N) & last)


@triton.jit(do_not_specialize=["chunks"])
def scan_kernel(tallies_ptr, totals_ptr, chunks, E, CHUNKS: tl.constexpr, EXPERTS: tl.constexpr):
    """Sums tallies over the chunks before, in place; totals int32 `[E + 1]`."""
    bins = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    before = tl.zeros((EXPERTS,), dtype=tl.int32)
    for c0 in range(0, chunks, CHUNKS):
        rows = c0 + tl.arange(0, CHUNKS)
        mask = (rows < chunks)[:, None] & (bins <= E)[None, :]
        tallies = tallies_ptr + rows.to(tl.int64)[:, None] * (E + 1) + bins[None, :]
        tally = tl.load(tallies, mask=mask, other=0)
        tl.store(tallies, tl.cumsum(tally, axis=0) - tally + before[None, :], mask=mask)
        before += tl.sum(tally, axis=0)
    tl.store(totals_ptr + bins, before, mask=bins <= E)


@triton.jit
def starts_kernel(totals_ptr, starts_ptr, ends_ptr, E, WIDTH: tl.constexpr):
    """starts int32 `[E + 1]`, the first slot of each bin; ends int32 `[E]`. One program."""
    bins = tl.arange(0, WIDTH)
    total = tl.load(totals_ptr + bins, mask=bins <= E, other=0)
    ends = tl.cumsum(total, axis=0)
    tl.store(starts_ptr + bins, ends - total, mask=bins <= E)
    tl.store(ends_ptr + bins, ends, mask=bins < E)


@triton.jit(do_not_specialize=["N"])
def place_kernel(ids_ptr, ranks_ptr, tallies_ptr, starts_ptr, position_ptr, order_ptr, N, E, CHUNK: tl.constexpr):
    """position int64 `[N]`: each choice's slot; order int64 `[N]`: each slot's choice."""
    numbers = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    inside = numbers < N
    bins = load_bins(ids_ptr, numbers, N, E)
    slots = tl.load(starts_ptr + bins, mask=inside, other=0)
    slots += tl.load(tallies_ptr + tl.program_id(0).to(tl.int64) * (E + 1) + bins, mask=inside, other=0)
    slots += tl.load(ranks_ptr + numbers, mask=inside, other=0)
    tl.store(position_ptr + numbers, slots.to(tl.int64), mask=inside)
    tl.store(order_ptr + slots, numbers.to(tl.int64), mask=inside)


@triton.jit(do_not_specialize=["S"])
def gather_kernel(
    x_ptr,
    order_ptr,
    end_ptr,
    out_ptr,
    S,
    D,
    x_row,
    x_col,
    TOPK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out[s] = x[order[s] // TOPK]` for s before `end` and S; out `[S, D]` contiguous, the rest of it left alone."""
    end = tl.minimum(tl.load(end_ptr), S)
    if tl.program_id(0) * ROWS < end:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
        inside = rows < end
        tokens = tl.load(order_ptr + rows, mask=inside, other=0) // TOPK
        mask = inside[:, None] & (columns < D)[None, :]
        x = tl.load(x_ptr + tokens[:, None] * x_row + columns.to(tl.int64)[None, :] * x_col, mask=mask)
        tl.store(out_ptr + rows.to(tl.int64)[:, None] * D + columns[None, :], x, mask=mask)

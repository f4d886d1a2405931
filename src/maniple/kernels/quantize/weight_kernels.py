"""The kernel that quantizes weights: Triton's language alone, no torch. `triton_kernels.py` has what it shares."""

from __future__ import annotations

import triton
import triton.language as tl

from maniple.kernels.quantize.triton_kernels import (
    as_fp32,
    four_rows,
    largest_of_four,
    scale_of,
    store_rows,
    store_turned,
)


@triton.jit
def weight_kernel(
    w_ptr,
    amax_ptr,
    forward_ptr,
    dgrad_ptr,
    scale_ptr,
    N,
    K,
    w_group,
    w_row,
    w_col,
    BLOCK: tl.constexpr,
    E8M0: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    CAST: tl.constexpr,
    EMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SLAB: tl.constexpr,
):
    """One tile of `w[g]`, quantized once in squares of BLOCK, written as it lies and (unless None) turned.

    forward `[G, N, K]`, dgrad `[G, K, N]`, scales `[G, ceil(N / BLOCK), ceil(K / BLOCK)]`. BLOCK 0: one scale a
    matrix, of its amax. To emulate, forward has values in place of bytes, and there are no scales.
    """
    column_tiles = tl.cdiv(K, COLUMNS)
    row_tiles = tl.cdiv(N, ROWS)
    g = tl.program_id(0) // (row_tiles * column_tiles)
    row_tile = tl.program_id(0) // column_tiles % row_tiles
    column_tile = tl.program_id(0) % column_tiles
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    matrix = w_ptr + g.to(tl.int64) * w_group
    begin = g.to(tl.int64) * N * K
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32  # of a magnitude
    if BLOCK == 0:
        stored, scale, inverse = scale_of(tl.load(amax_ptr + g + tl.arange(0, 1)), BLOCK, E8M0, FORMAT, ROUNDING)
        if row_tile + column_tile == 0:
            tl.store(scale_ptr + g + tl.arange(0, 1), stored)
        scale = scale[:, None]
        inverse = inverse[:, None]
    elif BLOCK > SLAB:  # one block: its scale first
        seen = tl.zeros((SLAB // 4, COLUMNS), BITS)
        for slab in range(0, ROWS, SLAB):
            fours = row_tile * ROWS + slab + tl.arange(0, SLAB // 4) * 4
            seen = tl.maximum(seen, largest_of_four(four_rows(matrix, fours, N, column, K, w_row, w_col, None, 0)))
        amax = as_fp32(tl.max(seen.reshape(1, (SLAB // 4) * COLUMNS), 1), DTYPE)
        stored, scale, inverse = scale_of(amax, BLOCK, E8M0, FORMAT, ROUNDING)
        scale_place = (g.to(tl.int64) * row_tiles + row_tile) * column_tiles + column_tile
        tl.store(scale_ptr + scale_place + tl.arange(0, 1), stored)
        scale = scale[:, None]
        inverse = inverse[:, None]

    for slab in range(0, ROWS, SLAB):
        fours = row_tile * ROWS + slab + tl.arange(0, SLAB // 4) * 4
        w = four_rows(matrix, fours, N, column, K, w_row, w_col, None, 0)
        if BLOCK == 0 or BLOCK > SLAB:
            w_scale = scale
            w_inverse = inverse
        else:
            DOWN: tl.constexpr = SLAB // BLOCK
            ACROSS: tl.constexpr = COLUMNS // BLOCK
            amax = tl.max(largest_of_four(w).reshape(DOWN, BLOCK // 4, ACROSS, BLOCK), 3)
            stored, b_scale, b_inverse = scale_of(as_fp32(tl.max(amax, 1), DTYPE), BLOCK, E8M0, FORMAT, ROUNDING)
            if not EMULATE:
                down = (row_tile * ROWS + slab) // BLOCK + tl.arange(0, DOWN)
                across = column_tile * ACROSS + tl.arange(0, ACROSS)
                tall = tl.cdiv(N, BLOCK)
                wide = tl.cdiv(K, BLOCK)
                scale_place = (g.to(tl.int64) * tall + down[:, None]) * wide + across[None, :]
                tl.store(scale_ptr + scale_place, stored, mask=(down < tall)[:, None] & (across < wide)[None, :])
            w_scale = over_square(b_scale, BLOCK)
            w_inverse = over_square(b_inverse, BLOCK)
        store_rows(forward_ptr + begin, w, w_scale, w_inverse, fours, N, column, K, FORMAT, CAST, EMULATE)
        if dgrad_ptr is not None:
            WORDS: tl.constexpr = dgrad_ptr.dtype.element_ty.primitive_bitwidth == 32
            turned = dgrad_ptr + (begin // 4 if WORDS else begin)
            store_turned(turned, w, w_scale, w_inverse, column, K, row_tile * ROWS + slab, N, FORMAT, CAST)


@triton.jit
def over_square(scale, BLOCK: tl.constexpr):
    """`[B, C]` as `[B * BLOCK / 4, C * BLOCK]`: each for a quarter of the rows of its square, and all columns."""
    DOWN: tl.constexpr = scale.shape[0]
    ACROSS: tl.constexpr = scale.shape[1]
    wide = tl.broadcast_to(scale[:, None, :, None], (DOWN, BLOCK // 4, ACROSS, BLOCK))
    return wide.reshape(DOWN * (BLOCK // 4), ACROSS * BLOCK)

"""The quantization kernels: Triton's language alone, no torch, so that another framework can launch them.

`triton.py` says what they are for and launches them; `reference.py` has the exact semantics, kept here bit for bit.
A block's largest magnitude is found on the bits of fp32 without their sign: as integers they are ordered like the
numbers, and infinity and NaN come last, so that none is lost. FORMAT is a `formats.Format`: a constant of the launch
and so part of the compiled kernel's key.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maniple.kernels.quantize import formats

INFINITY = tl.constexpr(0x7F800000)
QUIET_NAN = tl.constexpr(0x7FC00000)
SMALLEST_SCALE = tl.constexpr(formats.SMALLEST_SCALE)


@triton.jit
def magnitude(x):
    """Bits of |x|, int32, for fp32 x."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def scale_of(amax, BLOCK: tl.constexpr, E8M0: tl.constexpr, FORMAT: tl.constexpr, ROUNDING: tl.constexpr):
    """(scale as it is stored, fp32 scale, its inverse) for the bits of amax; NaN where that is not finite."""
    bad = amax >= INFINITY
    nan = tl.full(amax.shape, QUIET_NAN, tl.int32).to(tl.float32, bitcast=True)
    if BLOCK == 0:
        whole = tl.div_rn(amax.to(tl.float32, bitcast=True), tl.full(amax.shape, FORMAT.largest, tl.float32))
        whole = tl.where(bad, nan, tl.maximum(whole, SMALLEST_SCALE))
        return whole, whole, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), whole)
    else:
        byte = (amax >> 23) - FORMAT.top
        if ROUNDING == "rceil":
            byte += ((amax & 0x7FFFFF) > FORMAT.extra).to(tl.int32)
        byte = tl.minimum(tl.maximum(byte, 0 if E8M0 else 1), FORMAT.largest_byte)
        inverse = tl.where(bad, nan, ((254 - byte) << 23).to(tl.float32, bitcast=True))
        scale = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)
        scale = tl.where(bad, nan, scale)
        if E8M0:
            return tl.where(bad, 255, byte).to(tl.uint8), scale, inverse
        else:
            return scale, scale, inverse


@triton.jit
def on_grid(v, FORMAT: tl.constexpr):
    """fp32 v, not beyond the largest number, rounded to the nearest number of the format, ties to even."""
    exponent = tl.maximum(magnitude(v) >> 23, FORMAT.smallest + 127)
    # adding 1.5 * 2^23 steps of the format's numbers there leaves an fp32 no room for less than a step
    steps = (((exponent + 23 - FORMAT.mantissa) << 23) | 0x00400000).to(tl.float32, bitcast=True)
    return (v + steps) - steps


@triton.jit
def to_bytes(v, FORMAT: tl.constexpr, NATIVE: tl.constexpr):
    """float8 bytes of fp32 v, which is not beyond the largest number."""
    if NATIVE:
        if FORMAT.name == "e5m2":
            return v.to(tl.float8e5).to(tl.uint8, bitcast=True)
        elif FORMAT.name == "e4m3fnuz":
            return v.to(tl.float8e4b8).to(tl.uint8, bitcast=True)
        else:
            return v.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    rounded = on_grid(v, FORMAT)
    bits = magnitude(rounded)
    normal = (bits >> (23 - FORMAT.mantissa)) - ((127 - FORMAT.bias) << FORMAT.mantissa)
    small = bits < ((FORMAT.smallest + 127) << 23)
    steps = tl.where(small, tl.abs(rounded), 0.0) * (2.0 ** (FORMAT.mantissa - FORMAT.smallest))
    byte = tl.where(small, steps.to(tl.int32), normal)
    sign = (v.to(tl.int32, bitcast=True) >> 24) & 0x80
    if not FORMAT.ocp:
        sign = tl.where(byte == 0, 0, sign)  # FNUZ: that byte is NaN
    return (byte | sign).to(tl.uint8)


@triton.jit
def rounded(x, scale, inverse, FORMAT: tl.constexpr, CAST: tl.constexpr, EMULATE: tl.constexpr):
    """float8 bytes of x, or, to emulate, the fp32 values that they and the scale stand for. All broadcast."""
    v = x * inverse
    if CAST == "saturating":
        return to_bytes(v, FORMAT, True)
    v = tl.minimum(tl.maximum(v, -FORMAT.largest), FORMAT.largest)  # no NaN is left of these
    if EMULATE:
        return on_grid(v, FORMAT) * scale
    else:
        nan = tl.full(v.shape, FORMAT.nan, tl.uint8)
        return tl.where(inverse == inverse, to_bytes(v, FORMAT, CAST == "plain"), nan)


@triton.jit
def four_rows(base, row, end, column, C, row_stride, column_stride, source_ptr):
    """fp32 `[R / 4, C, 4]`: rows `4 * row + i` for i in 0..3 and given columns, zero where there are none.

    A thread that reads some columns of one of them so holds those of all four: blocks down the rows are reduced without
    others in part, and what is stored turned comes in fours of bytes.
    """
    a = one_of_four(base, row, end, column, C, row_stride, column_stride, source_ptr)
    b = one_of_four(base, row + 1, end, column, C, row_stride, column_stride, source_ptr)
    c = one_of_four(base, row + 2, end, column, C, row_stride, column_stride, source_ptr)
    d = one_of_four(base, row + 3, end, column, C, row_stride, column_stride, source_ptr)
    four = tl.join(tl.join(a, c), tl.join(b, d))
    return four.reshape(row.shape[0], column.shape[0], 4).to(tl.float32)


@triton.jit
def one_of_four(base, row, end, column, C, row_stride, column_stride, source_ptr):
    inside = row < end
    source = row
    if source_ptr is not None:
        source = tl.load(source_ptr + row, mask=inside, other=0)
    ptrs = base + source.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(ptrs, mask=inside[:, None] & (column < C)[None, :], other=0.0)


@triton.jit
def as_rows(four):
    """`[R / 4, C, 4]` as `[R, C]`."""
    return four.permute(0, 2, 1).reshape(four.shape[0] * 4, four.shape[1])


@triton.jit
def as_columns(four):
    """`[R / 4, C, 4]` as `[C, R]`."""
    return four.permute(1, 0, 2).reshape(four.shape[1], four.shape[0] * 4)


@triton.jit
def tiles_kernel(
    ends_ptr,
    padded_ptr,
    top_ptr,
    end_ptr,
    tiles,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Where each group ends when all start at multiples of ROWS, and of each tile of ROWS its first row and its end.

    A tile's end is its group's: it has the rows from top to end, or none where both are 0.
    """
    g = tl.arange(0, WIDTH)
    end = tl.load(ends_ptr + g, mask=g < GROUPS, other=0)
    start = tl.load(ends_ptr + g - 1, mask=(g > 0) & (g < GROUPS), other=0)
    sizes = tl.where(g < GROUPS, (end - start + ROWS - 1) // ROWS * ROWS, 0)
    padded = tl.cumsum(sizes, 0)
    if tl.program_id(0) == 0:
        tl.store(padded_ptr + g, padded, mask=g < GROUPS)
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    first = tile[:, None] * ROWS
    inside = (first >= (padded - sizes)[None, :]) & (first < padded[None, :])  # of one group, or of none
    top = tl.sum(tl.where(inside, first + (start - padded + sizes)[None, :], 0), 1)
    tl.store(top_ptr + tile, top, mask=tile < tiles)
    tl.store(end_ptr + tile, tl.sum(tl.where(inside, end[None, :], 0), 1), mask=tile < tiles)


@triton.jit
def amax_kernel(
    x_ptr,
    source_ptr,
    end_ptr,
    amax_ptr,
    R,
    C,
    x_matrix,
    x_row,
    x_col,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Bits of the largest magnitude of each matrix `[R, C]`, put into int32 that were zero: the order does not matter.

    With `end_ptr`, of one matrix's rows before `end` only; with `source_ptr`, row s is `x[source[s]]`.
    """
    column_tiles = tl.cdiv(C, COLUMNS)
    row_tiles = tl.cdiv(R, ROWS)
    tile = tl.program_id(0)
    m = tile // (row_tiles * column_tiles)
    row = tile // column_tiles % row_tiles * ROWS + tl.arange(0, ROWS)
    column = tile % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    end = R
    if end_ptr is not None:
        end = tl.load(end_ptr)
    inside = row < end
    if source_ptr is not None:
        row = tl.load(source_ptr + row, mask=inside, other=0)
    ptrs = x_ptr + m.to(tl.int64) * x_matrix + row.to(tl.int64)[:, None] * x_row + column.to(tl.int64)[None, :] * x_col
    x = tl.load(ptrs, mask=inside[:, None] & (column < C)[None, :], other=0.0).to(tl.float32)
    tl.atomic_max(amax_ptr + m, tl.max(tl.max(magnitude(x), 1), 0), sem="relaxed")


@triton.jit
def rows_kernel(
    x_ptr,
    source_ptr,
    top_ptr,
    end_ptr,
    amax_ptr,
    along_ptr,
    along_scale_ptr,
    down_ptr,
    down_scale_ptr,
    K,
    P,
    x_row,
    x_col,
    along_scale_row,
    along_scale_col,
    down_scale_row,
    down_scale_col,
    BLOCK: tl.constexpr,
    E8M0: tl.constexpr,
    FORMAT: tl.constexpr,
    ROUNDING: tl.constexpr,
    CAST: tl.constexpr,
    EMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One tile of one group: read once, quantized along K (`along`, `[S, K]`) and along rows (`down`, `[K, P]`).

    Either pointer may be None. To emulate, both are `[S, K]` of values, and there are no scales. BLOCK 0: one scale for
    all, of amax, which the first program writes.
    """
    column_tiles = tl.cdiv(K, COLUMNS)
    first = tl.program_id(0) // column_tiles * ROWS
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.load(top_ptr + first // ROWS)
    end = tl.load(end_ptr + first // ROWS)

    if BLOCK == 0:
        stored, scale, inverse = scale_of(tl.load(amax_ptr + tl.arange(0, 1)), BLOCK, E8M0, FORMAT, ROUNDING)
        if tl.program_id(0) == 0:
            if along_ptr is not None:
                tl.store(along_scale_ptr + tl.arange(0, 1), stored)
            if down_ptr is not None:
                tl.store(down_scale_ptr + tl.arange(0, 1), stored)

    if top < end:
        fours = top + tl.arange(0, ROWS // 4) * 4
        x = four_rows(x_ptr, fours, end, column, K, x_row, x_col, source_ptr)
        row = top + tl.arange(0, ROWS)
        inside = row < end
        mask = inside[:, None] & (column < K)[None, :]
        place = row.to(tl.int64)[:, None] * K + column[None, :]

        if along_ptr is not None:
            if BLOCK == 0:
                along = rounded(x, scale[:, None, None], inverse[:, None, None], FORMAT, CAST, EMULATE)
            else:
                x4 = x.reshape(ROWS // 4, COLUMNS // BLOCK, BLOCK, 4)
                a_stored, a_scale, a_inverse = scale_of(tl.max(magnitude(x4), 2), BLOCK, E8M0, FORMAT, ROUNDING)
                along = rounded(x4, a_scale[:, :, None, :], a_inverse[:, :, None, :], FORMAT, CAST, EMULATE)
                along = along.reshape(ROWS // 4, COLUMNS, 4)
                if not EMULATE:
                    block = tl.program_id(0) % column_tiles * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
                    scale_place = row.to(tl.int64)[:, None] * along_scale_row + block[None, :] * along_scale_col
                    scale_mask = inside[:, None] & (block < tl.cdiv(K, BLOCK))[None, :]
                    tl.store(along_scale_ptr + scale_place, as_rows(a_stored), mask=scale_mask)
            tl.store(along_ptr + place, as_rows(along).to(along_ptr.dtype.element_ty), mask=mask)

        if down_ptr is not None:
            if BLOCK == 0:
                down = rounded(x, scale[:, None, None], inverse[:, None, None], FORMAT, CAST, EMULATE)
            else:
                x4 = x.reshape(ROWS // BLOCK, BLOCK // 4, COLUMNS, 4)
                amax = tl.max(tl.max(magnitude(x4), 3), 1)
                d_stored, d_scale, d_inverse = scale_of(amax, BLOCK, E8M0, FORMAT, ROUNDING)
                down = rounded(x4, d_scale[:, None, :, None], d_inverse[:, None, :, None], FORMAT, CAST, EMULATE)
                down = down.reshape(ROWS // 4, COLUMNS, 4)
                if not EMULATE:
                    block = first // BLOCK + tl.arange(0, ROWS // BLOCK)
                    scale_place = column.to(tl.int64)[None, :] * down_scale_row + block[:, None] * down_scale_col
                    tl.store(down_scale_ptr + scale_place, d_stored, mask=(column < K)[None, :])
            if EMULATE:
                tl.store(down_ptr + place, as_rows(down).to(down_ptr.dtype.element_ty), mask=mask)
            else:
                # the padding too: x is zero there
                turned = column.to(tl.int64)[:, None] * P + (first + tl.arange(0, ROWS))[None, :]
                tl.store(down_ptr + turned, as_columns(down), mask=(column < K)[:, None])


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
):
    """One tile of `w[g]`: read once, quantized once in squares of BLOCK, written as it lies and (unless None) turned.

    forward `[G, N, K]`, dgrad `[G, K, N]`, scales `[G, ceil(N / BLOCK), ceil(K / BLOCK)]`. BLOCK 0: one scale a
    matrix, of its amax. To emulate, forward has values in place of bytes, and there are no scales.
    """
    column_tiles = tl.cdiv(K, COLUMNS)
    row_tiles = tl.cdiv(N, ROWS)
    g = tl.program_id(0) // (row_tiles * column_tiles)
    row_tile = tl.program_id(0) // column_tiles % row_tiles
    column_tile = tl.program_id(0) % column_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    fours = row_tile * ROWS + tl.arange(0, ROWS // 4) * 4
    w = four_rows(w_ptr + g.to(tl.int64) * w_group, fours, N, column, K, w_row, w_col, None)
    if BLOCK == 0:
        stored, scale, inverse = scale_of(tl.load(amax_ptr + g + tl.arange(0, 1)), BLOCK, E8M0, FORMAT, ROUNDING)
        out = rounded(w, scale[:, None, None], inverse[:, None, None], FORMAT, CAST, EMULATE)
        if row_tile + column_tile == 0:
            tl.store(scale_ptr + g + tl.arange(0, 1), stored)
    else:
        w5 = w.reshape(ROWS // BLOCK, BLOCK // 4, COLUMNS // BLOCK, BLOCK, 4)
        amax = tl.max(tl.max(tl.max(magnitude(w5), 4), 3), 1)
        stored, scale, inverse = scale_of(amax, BLOCK, E8M0, FORMAT, ROUNDING)
        scale, inverse = scale[:, None, :, None, None], inverse[:, None, :, None, None]
        out = rounded(w5, scale, inverse, FORMAT, CAST, EMULATE).reshape(ROWS // 4, COLUMNS, 4)
        if not EMULATE:
            down = row_tile * (ROWS // BLOCK) + tl.arange(0, ROWS // BLOCK)
            across = column_tile * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
            tall = tl.cdiv(N, BLOCK)
            wide = tl.cdiv(K, BLOCK)
            place = (g.to(tl.int64) * tall + down[:, None]) * wide + across[None, :]
            tl.store(scale_ptr + place, stored, mask=(down < tall)[:, None] & (across < wide)[None, :])
    begin = g.to(tl.int64) * N * K
    place = begin + row.to(tl.int64)[:, None] * K + column[None, :]
    mask = (row < N)[:, None] & (column < K)[None, :]
    tl.store(forward_ptr + place, as_rows(out).to(forward_ptr.dtype.element_ty), mask=mask)
    if dgrad_ptr is not None:
        turned = begin + column.to(tl.int64)[:, None] * N + row[None, :]
        tl.store(dgrad_ptr + turned, as_columns(out), mask=(column < K)[:, None] & (row < N)[None, :])

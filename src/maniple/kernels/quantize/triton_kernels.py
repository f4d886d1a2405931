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


# four float8 of fp32 numbers as the bytes of a word, the first lowest
FOUR_E4M3 = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)
FOUR_E5M2 = tl.constexpr(
    "{ .reg .b16 low, high; cvt.rn.satfinite.e5m2x2.f32 low, $2, $1; "
    "cvt.rn.satfinite.e5m2x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }"
)


@triton.jit
def magnitude(x):
    """Bits of |x|: int32 for fp32 x, int16 for bf16."""
    if x.dtype == tl.bfloat16:
        return x.to(tl.int16, bitcast=True) & 0x7FFF
    else:
        return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def as_fp32(amax, DTYPE: tl.constexpr):
    """Bits of fp32, int32, for those of a magnitude in DTYPE."""
    if DTYPE.primitive_bitwidth == 16:
        return amax.to(tl.int32) << 16
    else:
        return amax


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
    v = x.to(tl.float32) * inverse
    if (
        CAST == "saturating"
    ):  # (some are wrong on sm_90 that Triton's own cast takes out of its words: seen with Triton 3.6)
        FOUR: tl.constexpr = FOUR_E5M2 if FORMAT.name == "e5m2" else FOUR_E4M3
        return tl.inline_asm_elementwise(FOUR, "=r,f,f,f,f", [v], dtype=tl.uint8, is_pure=True, pack=4)
    v = tl.minimum(tl.maximum(v, -FORMAT.largest), FORMAT.largest)  # no NaN is left of these
    if EMULATE:
        return on_grid(v, FORMAT) * scale
    else:
        nan = tl.full(v.shape, FORMAT.nan, tl.uint8)
        return tl.where(inverse == inverse, to_bytes(v, FORMAT, CAST == "plain"), nan)


@triton.jit
def one_of_four(base, row, end, column, C, row_stride, column_stride, source_ptr, T):
    """`[R / 4, C']`: given rows (every fourth, in use) and columns, zero where there are none."""
    inside = row < end
    source = row
    if source_ptr is not None:
        source = tl.load(source_ptr + row, mask=inside, other=-1)
        inside = (source >= 0) & (source < T)
    ptrs = base + source.to(tl.int64)[:, None] * row_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(ptrs, mask=inside[:, None] & (column < C)[None, :], other=0.0)


@triton.jit
def four_rows(base, row, end, column, C, row_stride, column_stride, source_ptr, T):
    """Rows `row + i` for i in 0..3, each as `one_of_four`: a thread that holds some columns of one has those of all.

    So what is stored along the rows goes as it was read, and what is stored turned comes in words of four bytes.
    """
    a = one_of_four(base, row, end, column, C, row_stride, column_stride, source_ptr, T)
    b = one_of_four(base, row + 1, end, column, C, row_stride, column_stride, source_ptr, T)
    c = one_of_four(base, row + 2, end, column, C, row_stride, column_stride, source_ptr, T)
    d = one_of_four(base, row + 3, end, column, C, row_stride, column_stride, source_ptr, T)
    return a, b, c, d


@triton.jit
def largest_of_four(x):
    """Bits of the largest magnitude in each place of four tensors."""
    return tl.maximum(
        tl.maximum(magnitude(x[0]), magnitude(x[1])),
        tl.maximum(magnitude(x[2]), magnitude(x[3])),
    )


@triton.jit
def store_turned(ptr, x, scale, inverse, column, C, first, R, FORMAT: tl.constexpr, CAST: tl.constexpr):
    """float8 of four rows `[R' / 4, C']`, from row `first` on, to columns of a `[C, R]`: words, if ptr is to them."""
    inside = (column < C)[:, None]
    place = column.to(tl.int64)[:, None]
    quarter = tl.arange(0, x[0].shape[0])  # (that neighbouring words follow each other is seen in this form alone)
    if ptr.dtype.element_ty.primitive_bitwidth == 32:
        if CAST == "saturating":
            FOUR: tl.constexpr = FOUR_E5M2 if FORMAT.name == "e5m2" else FOUR_E4M3
            a = x[0].to(tl.float32) * inverse
            b = x[1].to(tl.float32) * inverse
            c = x[2].to(tl.float32) * inverse
            d = x[3].to(tl.float32) * inverse
            word = tl.inline_asm_elementwise(FOUR, "=r,f,f,f,f", [a, b, c, d], dtype=tl.int32, is_pure=True, pack=1)
        else:
            low = rounded(x[0], scale, inverse, FORMAT, CAST, False).to(tl.uint32)
            low |= rounded(x[1], scale, inverse, FORMAT, CAST, False).to(tl.uint32) << 8
            high = rounded(x[2], scale, inverse, FORMAT, CAST, False).to(tl.uint32)
            high |= rounded(x[3], scale, inverse, FORMAT, CAST, False).to(tl.uint32) << 8
            word = (low | (high << 16)).to(tl.int32, bitcast=True)
        fours = first // 4 + quarter
        tl.store(ptr + place * (R // 4) + fours[None, :], tl.trans(word), mask=inside & (fours < R // 4)[None, :])
    else:
        for i in tl.static_range(4):
            row = first + quarter * 4 + i
            bytes = rounded(x[i], scale, inverse, FORMAT, CAST, False)
            tl.store(ptr + place * R + row[None, :], tl.trans(bytes), mask=inside & (row < R)[None, :])


@triton.jit
def store_rows(
    ptr, x, scale, inverse, row, end, column, C, FORMAT: tl.constexpr, CAST: tl.constexpr, EMULATE: tl.constexpr
):
    """Four rows, `row + i`, as they lie in `[R, C]`: float8, or, to emulate, their values."""
    for i in tl.static_range(4):
        out = rounded(x[i], scale, inverse, FORMAT, CAST, EMULATE)
        place = (row + i).to(tl.int64)[:, None] * C + column[None, :]
        inside = (row + i < end)[:, None] & (column < C)[None, :]
        tl.store(ptr + place, out.to(ptr.dtype.element_ty), mask=inside)


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
    T,
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
        row = tl.load(source_ptr + row, mask=inside, other=-1)
        inside = (row >= 0) & (row < T)
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
    T,
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
    SLAB: tl.constexpr,
):
    """One tile of one group, quantized along K (`along`, `[S, K]`) and along rows (`down`, `[K, P]`).

    Either pointer may be None. To emulate, both are `[S, K]` of values, and there are no scales. BLOCK 0: one scale for
    all, of amax, which the first program writes.
    """
    column_tiles = tl.cdiv(K, COLUMNS)
    first = tl.program_id(0) // column_tiles * ROWS
    column_tile = tl.program_id(0) % column_tiles
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    top = tl.load(top_ptr + first // ROWS)
    end = tl.load(end_ptr + first // ROWS)
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    BITS: tl.constexpr = tl.int16 if DTYPE.primitive_bitwidth == 16 else tl.int32  # of a magnitude
    TALL: tl.constexpr = BLOCK > SLAB  # blocks down the rows are known when all slabs have been seen

    if BLOCK == 0:
        stored, scale, inverse = scale_of(tl.load(amax_ptr + tl.arange(0, 1)), BLOCK, E8M0, FORMAT, ROUNDING)
        if tl.program_id(0) == 0:
            if along_ptr is not None:
                tl.store(along_scale_ptr + tl.arange(0, 1), stored)
            if down_ptr is not None:
                tl.store(down_scale_ptr + tl.arange(0, 1), stored)
        scale = scale[:, None]
        inverse = inverse[:, None]

    if top < end:
        if TALL:
            seen = tl.zeros((SLAB // 4, COLUMNS), BITS)
        for slab in range(0, ROWS, SLAB):
            fours = slab + tl.arange(0, SLAB // 4) * 4
            x = four_rows(x_ptr, top + fours, end, column, K, x_row, x_col, source_ptr, T)

            if along_ptr is not None:
                for i in tl.static_range(4):
                    row = top + fours + i
                    if BLOCK == 0:
                        along = rounded(x[i], scale, inverse, FORMAT, CAST, EMULATE)
                    else:
                        blocks = x[i].reshape(SLAB // 4, COLUMNS // BLOCK, BLOCK)
                        amax = as_fp32(tl.max(magnitude(blocks), 2), DTYPE)
                        a_stored, a_scale, a_inverse = scale_of(amax, BLOCK, E8M0, FORMAT, ROUNDING)
                        along = rounded(blocks, a_scale[:, :, None], a_inverse[:, :, None], FORMAT, CAST, EMULATE)
                        along = along.reshape(SLAB // 4, COLUMNS)
                        if not EMULATE:
                            block = column_tile * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK)
                            place = row.to(tl.int64)[:, None] * along_scale_row + block[None, :] * along_scale_col
                            inside = (row < end)[:, None] & (block < tl.cdiv(K, BLOCK))[None, :]
                            tl.store(along_scale_ptr + place, a_stored, mask=inside)
                    place = row.to(tl.int64)[:, None] * K + column[None, :]
                    inside = (row < end)[:, None] & (column < K)[None, :]
                    tl.store(along_ptr + place, along.to(along_ptr.dtype.element_ty), mask=inside)

            if down_ptr is not None:
                if TALL:
                    seen = tl.maximum(seen, largest_of_four(x))
                elif BLOCK == 0:
                    store_down(
                        down_ptr, x, scale, inverse, column, K, top, slab, fours, end, first, P, FORMAT, CAST, EMULATE
                    )
                else:
                    amax = as_fp32(tl.max(largest_of_four(x).reshape(SLAB // BLOCK, BLOCK // 4, COLUMNS), 1), DTYPE)
                    d_stored, d_scale, d_inverse = scale_of(amax, BLOCK, E8M0, FORMAT, ROUNDING)
                    if not EMULATE:
                        block = (first + slab) // BLOCK + tl.arange(0, SLAB // BLOCK)
                        place = column.to(tl.int64)[None, :] * down_scale_row + block[:, None] * down_scale_col
                        tl.store(down_scale_ptr + place, d_stored, mask=(column < K)[None, :])
                    d_scale = over_block(d_scale, BLOCK // 4)
                    d_inverse = over_block(d_inverse, BLOCK // 4)
                    store_down(
                        down_ptr,
                        x,
                        d_scale,
                        d_inverse,
                        column,
                        K,
                        top,
                        slab,
                        fours,
                        end,
                        first,
                        P,
                        FORMAT,
                        CAST,
                        EMULATE,
                    )

        if TALL and down_ptr is not None:
            stored, scale, inverse = scale_of(as_fp32(tl.max(seen, 0), DTYPE), BLOCK, E8M0, FORMAT, ROUNDING)
            place = column.to(tl.int64) * down_scale_row + first // BLOCK * down_scale_col
            tl.store(down_scale_ptr + place, stored, mask=column < K)
            scale = scale[None, :]
            inverse = inverse[None, :]
            for slab in range(0, ROWS, SLAB):  # read again, out of a cache
                fours = slab + tl.arange(0, SLAB // 4) * 4
                x = four_rows(x_ptr, top + fours, end, column, K, x_row, x_col, source_ptr, T)
                store_down(
                    down_ptr, x, scale, inverse, column, K, top, slab, fours, end, first, P, FORMAT, CAST, EMULATE
                )


@triton.jit
def over_block(scale, ROWS: tl.constexpr):
    """`[B, C]` as `[B * ROWS, C]`: each for its block's rows."""
    return tl.broadcast_to(scale[:, None, :], (scale.shape[0], ROWS, scale.shape[1])).reshape(
        scale.shape[0] * ROWS, scale.shape[1]
    )


@triton.jit
def store_down(
    down_ptr,
    x,
    scale,
    inverse,
    column,
    K,
    top,
    slab,
    fours,
    end,
    first,
    P,
    FORMAT: tl.constexpr,
    CAST: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Four rows with scales that broadcast: turned, the padding (which is zero) too; or, to emulate, as they lie."""
    if EMULATE:
        store_rows(down_ptr, x, scale, inverse, top + fours, end, column, K, FORMAT, CAST, EMULATE)
    else:
        store_turned(down_ptr, x, scale, inverse, column, K, first + slab, P, FORMAT, CAST)

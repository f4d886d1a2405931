"""The portable grouped GEMM kernels: Triton's language alone, no torch, so that another framework can launch them.

`triton.py` says what they are for and launches them. The docstrings give what each computes; shapes are legended there.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def place(number, row_tiles, column_tiles, BAND: tl.constexpr):
    """(row, column) of a tile by its number: down a band of rows, then on to the next column."""
    in_band = BAND * column_tiles
    first = number // in_band * BAND
    height = tl.minimum(row_tiles - first, BAND)
    inner = number % in_band
    return first + inner % height, inner // height


@triton.jit
def source_of(source_ptr, rows, end, T, GATHER: tl.constexpr):
    """Which rows of x the operand's `rows` are, int64, and which of them exist: not past `end`, and within x."""
    if GATHER:
        sources = tl.load(source_ptr + rows, mask=rows < end, other=-1)
        return sources.to(tl.int64), (sources >= 0) & (sources < T)
    else:
        return rows.to(tl.int64), rows < end


@triton.jit
def rows_kernel(
    x_ptr,
    w_ptr,
    out_ptr,
    ends_ptr,
    source_ptr,
    bias_ptr,
    scale_ptr,
    x_desc,
    w_desc,
    out_desc,
    T,
    N,
    K,
    x_row,
    x_col,
    w_group,
    w_n,
    w_k,
    out_row,
    GROUPS: tl.constexpr,
    NK: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`out[s] = x[s] @ w[g] + scale[s] * bias[g]` for the rows s of each group g; rows past the last group stay.

    With GATHER x is `[T, K]` and `x[source[s]]` stands for `x[s]`: its rows come through pointers, all else as ever.
    """
    column_tiles = tl.cdiv(N, COLUMNS)
    tile = tl.program_id(0)
    first = 0  # number of the group's first tile
    start = 0  # and its first row
    for g in range(GROUPS):
        end = tl.load(ends_ptr + g)
        row_tiles = tl.cdiv(end - start, ROWS)
        last = first + row_tiles * column_tiles
        while tile < last:
            i, j = place(tile - first, row_tiles, column_tiles, BAND)
            row0 = start + i * ROWS
            n0 = j * COLUMNS
            rows = row0 + tl.arange(0, ROWS)
            columns = n0 + tl.arange(0, COLUMNS)
            sources, present = source_of(source_ptr, rows, end, T, GATHER)
            a_ptrs = x_ptr + sources[:, None] * x_row
            b_ptrs = w_ptr + tl.cast(g, tl.int64) * w_group + columns.to(tl.int64)[None, :] * w_n
            acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for k0 in range(0, K, DEPTH):
                ks = k0 + tl.arange(0, DEPTH)
                in_k = ks < K
                if DESCRIPTORS and not GATHER:
                    a = x_desc.load([row0, k0])
                else:
                    inside = present[:, None] & in_k[None, :]
                    a = tl.load(a_ptrs + ks.to(tl.int64)[None, :] * x_col, mask=inside, other=0.0)
                if DESCRIPTORS and NK:
                    b = w_desc.load([g, n0, k0]).reshape(COLUMNS, DEPTH).T
                elif DESCRIPTORS:
                    b = w_desc.load([g, k0, n0]).reshape(DEPTH, COLUMNS)
                else:
                    inside = in_k[:, None] & (columns < N)[None, :]
                    b = tl.load(b_ptrs + ks.to(tl.int64)[:, None] * w_k, mask=inside, other=0.0)
                acc = tl.dot(a, b, acc, input_precision=PRECISION)
            if BIAS:
                bias = tl.load(bias_ptr + tl.cast(g, tl.int64) * N + columns, mask=columns < N, other=0.0)
                if SCALE:
                    scale = tl.load(scale_ptr + rows, mask=rows < end, other=0.0).to(tl.float32)
                    acc += scale[:, None] * bias.to(tl.float32)[None, :]
                else:
                    acc += bias.to(tl.float32)[None, :]
            if DESCRIPTORS and row0 + ROWS <= end:
                out_desc.store([row0, n0], acc.to(out_desc.dtype))
            else:
                ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
                inside = (rows < end)[:, None] & (columns < N)[None, :]
                tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=inside)
            tile += tl.num_programs(0)
        first = last
        start = end


@triton.jit
def add(out_ptr, values, a0, b0, A, B, out_a, out_b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Adds a tile to the matrix `[A, B]` at `out_ptr`."""
    in_a = a0 + tl.arange(0, ROWS)
    in_b = b0 + tl.arange(0, COLUMNS)
    ptrs = out_ptr + in_a.to(tl.int64)[:, None] * out_a + in_b.to(tl.int64)[None, :] * out_b
    inside = (in_a < A)[:, None] & (in_b < B)[None, :]
    sums = values + tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    tl.store(ptrs, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def wgrad_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    ends_ptr,
    source_ptr,
    a_desc,
    b_desc,
    T,
    A,
    B,
    a_row,
    a_col,
    b_row,
    b_col,
    out_group,
    out_a,
    out_b,
    GROUPS: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    GATHER_A: tl.constexpr,
    GATHER_B: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`out[g] (+)= a[rows of g]ᵀ @ b[rows of g]`: `[A, B]`, zero (or as it was) for an empty group.

    With GATHER_A or GATHER_B that operand has T rows, and row s is its row `source[s]`.
    """
    a_tiles = tl.cdiv(A, ROWS)
    b_tiles = tl.cdiv(B, COLUMNS)
    for tile in range(tl.program_id(0), GROUPS * a_tiles * b_tiles, tl.num_programs(0)):
        g = tile // (a_tiles * b_tiles)
        i, j = place(tile % (a_tiles * b_tiles), a_tiles, b_tiles, BAND)
        start = tl.load(ends_ptr + g - 1, mask=g > 0, other=0)
        end = tl.load(ends_ptr + g)
        whole = start + (end - start) // DEPTH * DEPTH
        a0 = i * ROWS
        b0 = j * COLUMNS
        in_a = a0 + tl.arange(0, ROWS)
        in_b = b0 + tl.arange(0, COLUMNS)
        a_cols = a_ptr + in_a.to(tl.int64)[None, :] * a_col
        b_cols = b_ptr + in_b.to(tl.int64)[None, :] * b_col
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for s in range(start, whole, DEPTH):
            rows = s + tl.arange(0, DEPTH)
            if DESCRIPTORS and not GATHER_A:
                a = a_desc.load([s, a0])
            else:
                a_rows, a_there = source_of(source_ptr, rows, end, T, GATHER_A)
                inside = (in_a < A)[None, :] & (a_there[:, None] if GATHER_A else True)
                a = tl.load(a_cols + a_rows[:, None] * a_row, mask=inside, other=0.0)
            if DESCRIPTORS and not GATHER_B:
                b = b_desc.load([s, b0])
            else:
                b_rows, b_there = source_of(source_ptr, rows, end, T, GATHER_B)
                inside = (in_b < B)[None, :] & (b_there[:, None] if GATHER_B else True)
                b = tl.load(b_cols + b_rows[:, None] * b_row, mask=inside, other=0.0)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        if whole < end:
            rows = whole + tl.arange(0, DEPTH)
            a_rows, a_there = source_of(source_ptr, rows, end, T, GATHER_A)
            a = tl.load(a_cols + a_rows[:, None] * a_row, mask=a_there[:, None] & (in_a < A)[None, :], other=0.0)
            b_rows, b_there = source_of(source_ptr, rows, end, T, GATHER_B)
            b = tl.load(b_cols + b_rows[:, None] * b_row, mask=b_there[:, None] & (in_b < B)[None, :], other=0.0)
            acc = tl.dot(a.T, b, acc, input_precision=PRECISION)
        out_g = out_ptr + tl.cast(g, tl.int64) * out_group
        if ACCUMULATE:
            if start < end:
                # half the columns at a time, so that what is there already finds registers
                left, right = acc.reshape(ROWS, 2, COLUMNS // 2).permute(0, 2, 1).split()
                add(out_g, left, a0, b0, A, B, out_a, out_b, ROWS, COLUMNS // 2)
                add(out_g, right, a0, b0 + COLUMNS // 2, A, B, out_a, out_b, ROWS, COLUMNS // 2)
        else:
            ptrs = out_g + in_a.to(tl.int64)[:, None] * out_a + in_b.to(tl.int64)[None, :] * out_b
            tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=(in_a < A)[:, None] & (in_b < B)[None, :])


@triton.jit
def bias_grad_kernel(
    grad_ptr,
    scale_ptr,
    out_ptr,
    ends_ptr,
    N,
    grad_row,
    grad_col,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out[g] = sum over the rows s of g of scale[s] * grad[s]`, in fp32; one program a group and column tile."""
    g = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(ends_ptr + g - 1, mask=g > 0, other=0)
    end = tl.load(ends_ptr + g)
    sums = tl.zeros((COLUMNS,), dtype=tl.float32)
    for s in range(start, end, ROWS):
        rows = s + tl.arange(0, ROWS)
        inside = (rows < end)[:, None] & (columns < N)[None, :]
        ptrs = grad_ptr + rows.to(tl.int64)[:, None] * grad_row + columns.to(tl.int64)[None, :] * grad_col
        grad = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
        if SCALE:
            grad *= tl.load(scale_ptr + rows, mask=rows < end, other=0.0).to(tl.float32)[:, None]
        sums += tl.sum(grad, axis=0)
    tl.store(out_ptr + tl.cast(g, tl.int64) * N + columns, sums.to(out_ptr.dtype.element_ty), mask=columns < N)


@triton.jit
def scale_grad_kernel(
    grad_ptr,
    bias_ptr,
    out_ptr,
    ends_ptr,
    S,
    N,
    grad_row,
    grad_col,
    GROUPS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out[s] = grad[s] . bias[group of s]` in fp32, zero past the last group; one program a block of rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    group = tl.zeros((ROWS,), dtype=tl.int32)
    for g in range(GROUPS):
        group += (rows >= tl.load(ends_ptr + g)).to(tl.int32)  # groups that end before the row
    used = group < GROUPS
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    for n0 in range(0, N, COLUMNS):
        columns = n0 + tl.arange(0, COLUMNS)
        inside = used[:, None] & (columns < N)[None, :]
        ptrs = grad_ptr + rows.to(tl.int64)[:, None] * grad_row + columns.to(tl.int64)[None, :] * grad_col
        grad = tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(bias_ptr + group.to(tl.int64)[:, None] * N + columns[None, :], mask=inside, other=0.0)
        sums += tl.sum(grad * bias.to(tl.float32), axis=1)
    tl.store(out_ptr + rows, sums.to(out_ptr.dtype.element_ty), mask=rows < S)


@triton.jit
def gather_sum_kernel(
    rows_ptr,
    slots_ptr,
    out_ptr,
    end_ptr,
    T,
    S,
    D,
    rows_row,
    rows_col,
    COPIES: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out[t] = sum over k of rows[slots[t, k]]`, k rising, in fp32; a slot outside [0, end) or past S adds nothing."""
    end = tl.minimum(tl.load(end_ptr), S)
    tokens = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_d = columns < D
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(COPIES):
        slots = tl.load(slots_ptr + tokens.to(tl.int64) * COPIES + k, mask=tokens < T, other=-1).to(tl.int64)
        inside = ((slots >= 0) & (slots < end))[:, None] & in_d[None, :]
        ptrs = rows_ptr + slots[:, None] * rows_row + columns.to(tl.int64)[None, :] * rows_col
        sums += tl.load(ptrs, mask=inside, other=0.0).to(tl.float32)
    ptrs = out_ptr + tokens.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(ptrs, sums.to(out_ptr.dtype.element_ty), mask=(tokens < T)[:, None] & in_d[None, :])


@triton.jit
def zero_tail_kernel(out_ptr, end_ptr, S, N, out_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Zeroes the rows from `end` to S; a program whose rows are all in use only reads `end`."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    end = tl.load(end_ptr)
    if tl.program_id(0) * ROWS + ROWS > end:
        for n0 in range(0, N, COLUMNS):
            columns = n0 + tl.arange(0, COLUMNS)
            ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
            past = (rows >= end)[:, None] & (rows < S)[:, None] & (columns < N)[None, :]
            tl.store(ptrs, tl.zeros((ROWS, COLUMNS), dtype=out_ptr.dtype.element_ty), mask=past)

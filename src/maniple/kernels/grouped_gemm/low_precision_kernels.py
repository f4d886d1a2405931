"""The portable low-precision grouped GEMM kernels: Triton's language alone, no torch.

`low_precision_triton.py` says what they are for and launches them. RECIPE says how the scales are spread: "fp8", one a
matrix; "fp8_block", fp32, one for 128 of the contraction of each row (of a weight: for 128 x 128); "mxfp8", E8M0 bytes,
one for 32 of the contraction of each row (of a weight: for 32 x 32).
"""

from __future__ import annotations

import triton
import triton.language as tl

from maniple.kernels.grouped_gemm.triton_kernels import add, place


@triton.jit
def rows_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    out_ptr,
    ends_ptr,
    bias_ptr,
    bias_scale_ptr,
    x_desc,
    w_desc,
    N,
    K,
    x_scale_row,
    x_scale_block,
    w_scale_group,
    w_scale_row,
    w_scale_block,
    out_row,
    GROUPS: tl.constexpr,
    RECIPE: tl.constexpr,
    X_FORMAT: tl.constexpr,
    W_FORMAT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
):
    """`out[s] = x[s] @ w[g]ᵀ + bias_scale[s] * bias[g]`; x `[S, K]`, w `[G, N, K]` contiguous float8."""
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
            group = tl.cast(g, tl.int64)
            a_ptrs = x_ptr + rows.to(tl.int64)[:, None] * K
            b_ptrs = w_ptr + group * N * K + columns.to(tl.int64)[None, :] * K
            a_scales = x_scale_ptr + rows.to(tl.int64) * x_scale_row
            b_scales = w_scale_ptr + group * w_scale_group
            acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for k0 in range(0, K, DEPTH):
                if DESCRIPTORS:
                    a = x_desc.load([row0, k0])
                    b = w_desc.load([g, n0, k0]).reshape(COLUMNS, DEPTH).T
                else:
                    ks = k0 + tl.arange(0, DEPTH)
                    a = tl.load(a_ptrs + ks[None, :], mask=(rows < end)[:, None] & (ks < K)[None, :], other=0.0)
                    b = tl.load(b_ptrs + ks[:, None], mask=(ks < K)[:, None] & (columns < N)[None, :], other=0.0)
                if RECIPE == "mxfp8":
                    blocks = k0 // 32 + tl.arange(0, DEPTH // 32)
                    in_k = (blocks < tl.cdiv(K, 32))[None, :]
                    offsets = blocks.to(tl.int64)[None, :]
                    a_scale = tl.load(
                        a_scales[:, None] + offsets * x_scale_block, mask=(rows < end)[:, None] & in_k, other=127
                    )
                    b_scale = tl.load(
                        b_scales + (columns // 32)[:, None].to(tl.int64) * w_scale_row + offsets * w_scale_block,
                        mask=(columns < N)[:, None] & in_k,
                        other=127,
                    )
                    acc = tl.dot_scaled(a, a_scale, X_FORMAT, b, b_scale, W_FORMAT, acc)
                elif RECIPE == "fp8_block":
                    block = tl.cast(k0 // 128, tl.int64)
                    a_scale = tl.load(a_scales + block * x_scale_block, mask=rows < end, other=0.0)
                    b_scale = tl.load(b_scales + tl.cast(n0 // 128, tl.int64) * w_scale_row + block * w_scale_block)
                    acc += tl.dot(a, b) * (a_scale * b_scale)[:, None]
                else:
                    # Hopper's float8 products keep some 14 bits of a sum: it is taken over in fp32 every 128 of K
                    acc = tl.dot(a, b, acc, max_num_imprecise_acc=128)
            if RECIPE == "fp8":
                acc *= tl.load(x_scale_ptr) * tl.load(b_scales)
            if BIAS:
                bias = tl.load(bias_ptr + group * N + columns, mask=columns < N, other=0.0).to(tl.float32)
                if SCALE:
                    scale = tl.load(bias_scale_ptr + rows, mask=rows < end, other=0.0).to(tl.float32)
                    acc += scale[:, None] * bias[None, :]
                else:
                    acc += bias[None, :]
            ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_row + columns[None, :]
            tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (columns < N)[None, :])
            tile += tl.num_programs(0)
        first = last
        start = end


@triton.jit
def wgrad_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    out_ptr,
    ends_ptr,
    a_desc,
    b_desc,
    A,
    B,
    P,
    a_scale_row,
    a_scale_block,
    b_scale_row,
    b_scale_block,
    out_group,
    out_a,
    out_b,
    GROUPS: tl.constexpr,
    RECIPE: tl.constexpr,
    A_FORMAT: tl.constexpr,
    B_FORMAT: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    ACCUMULATE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
):
    """`out[g] (+)= a[:, columns of g] @ b[:, columns of g]ᵀ`; a `[A, P]`, b `[B, P]` contiguous float8.

    `ends` holds where the columns of each group end: multiples of 128, with zeros after the group's own.
    """
    a_tiles = tl.cdiv(A, ROWS)
    b_tiles = tl.cdiv(B, COLUMNS)
    tile = tl.program_id(0)
    while tile < GROUPS * a_tiles * b_tiles:
        g = tile // (a_tiles * b_tiles)
        i, j = place(tile % (a_tiles * b_tiles), a_tiles, b_tiles, BAND)
        start = tl.multiple_of(tl.load(ends_ptr + g - 1, mask=g > 0, other=0), 128)
        end = tl.load(ends_ptr + g)
        a0 = i * ROWS
        b0 = j * COLUMNS
        in_a = a0 + tl.arange(0, ROWS)
        in_b = b0 + tl.arange(0, COLUMNS)
        a_rows = a_ptr + in_a.to(tl.int64)[:, None] * P
        b_rows = b_ptr + in_b.to(tl.int64)[None, :] * P
        a_scales = a_scale_ptr + in_a.to(tl.int64) * a_scale_row
        b_scales = b_scale_ptr + in_b.to(tl.int64) * b_scale_row
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for p in range(start, end, DEPTH):
            if DESCRIPTORS:
                a = a_desc.load([a0, p])
                b = b_desc.load([b0, p]).T
            else:
                ps = p + tl.arange(0, DEPTH)
                a = tl.load(a_rows + ps[None, :], mask=(in_a < A)[:, None], other=0.0)
                b = tl.load(b_rows + ps[:, None], mask=(in_b < B)[None, :], other=0.0)
            if RECIPE == "mxfp8":
                blocks = (p // 32 + tl.arange(0, DEPTH // 32)).to(tl.int64)[None, :]
                a_scale = tl.load(a_scales[:, None] + blocks * a_scale_block, mask=(in_a < A)[:, None], other=127)
                b_scale = tl.load(b_scales[:, None] + blocks * b_scale_block, mask=(in_b < B)[:, None], other=127)
                acc = tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, acc)
            elif RECIPE == "fp8_block":
                block = tl.cast(p // 128, tl.int64)
                a_scale = tl.load(a_scales + block * a_scale_block, mask=in_a < A, other=0.0)
                b_scale = tl.load(b_scales + block * b_scale_block, mask=in_b < B, other=0.0)
                acc += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
            else:
                acc = tl.dot(a, b, acc, max_num_imprecise_acc=128)
        if RECIPE == "fp8":
            acc *= tl.load(a_scale_ptr) * tl.load(b_scale_ptr)
        out_g = out_ptr + tl.cast(g, tl.int64) * out_group
        if ACCUMULATE:
            if start < end:
                add(out_g, acc, a0, b0, A, B, out_a, out_b, ROWS, COLUMNS)
        else:
            ptrs = out_g + in_a.to(tl.int64)[:, None] * out_a + in_b.to(tl.int64)[None, :] * out_b
            tl.store(ptrs, acc.to(out_ptr.dtype.element_ty), mask=(in_a < A)[:, None] & (in_b < B)[None, :])
        tile += tl.num_programs(0)

"""The portable grouped GEMM whose epilogue is SwiGLU: Triton's language alone, no torch.

`triton.py` launches it. Stacked and interleaved gate and up are one kernel: a weight is seen as `[G, 2, F, K]`, whose
strides say where the halves lie, and so are its bias `[G, 2, F]` and the product `[S, 2, F]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maniple.kernels.grouped_gemm.triton_kernels import place, source_of
from maniple.kernels.swiglu.triton_kernels import activation


@triton.jit
def load_half(
    w_desc,
    w_ptrs,
    half,
    g,
    f0,
    k0,
    inside,
    NK: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """`[DEPTH, COLUMNS]` of one half of group g's weights: through the descriptor, else through pointers."""
    if DESCRIPTORS and NK:
        return w_desc.load([g, half, f0, k0]).reshape(COLUMNS, DEPTH).T
    elif DESCRIPTORS:
        return w_desc.load([g, k0, half, f0]).reshape(DEPTH, COLUMNS)
    else:
        return tl.load(w_ptrs, mask=inside, other=0.0)


@triton.jit
def swiglu_rows_kernel(
    x_ptr,
    w_ptr,
    act_ptr,
    gate_up_ptr,
    ends_ptr,
    source_ptr,
    bias_ptr,
    probs_ptr,
    x_desc,
    w_desc,
    T,
    F,
    K,
    x_row,
    x_col,
    w_group,
    w_half,
    w_f,
    w_k,
    half,
    GROUPS: tl.constexpr,
    NK: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    GATHER: tl.constexpr,
    BIAS: tl.constexpr,
    PROBS: tl.constexpr,
    KEEP: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`act[s] = probs[s] * activation(gate[s], up[s])` with gate, up = x[s] @ w[g] + bias[g], rounded to act's dtype.

    act `[S, F]` and, with KEEP, gate_up `[S, 2F]` are contiguous. `half`: between gate and up of one column, in a row
    of gate_up and of the bias: F where they are stacked, 1 where they are interleaved. Rows past the last group stay.
    """
    STEP: tl.constexpr = 2 if INTERLEAVED else 1
    column_tiles = tl.cdiv(F, COLUMNS)
    tile = tl.program_id(0)
    first = 0
    start = 0
    for g in range(GROUPS):
        end = tl.load(ends_ptr + g)
        row_tiles = tl.cdiv(end - start, ROWS)
        last = first + row_tiles * column_tiles
        while tile < last:
            i, j = place(tile - first, row_tiles, column_tiles, BAND)
            row0 = start + i * ROWS
            f0 = j * COLUMNS
            rows = row0 + tl.arange(0, ROWS)
            columns = f0 + tl.arange(0, COLUMNS)
            in_f = columns < F
            sources, present = source_of(source_ptr, rows, end, T, GATHER)
            a_ptrs = x_ptr + sources[:, None] * x_row
            w_ptrs = w_ptr + tl.cast(g, tl.int64) * w_group + columns.to(tl.int64)[None, :] * w_f
            gate = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            up = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
            for k0 in range(0, K, DEPTH):
                ks = k0 + tl.arange(0, DEPTH)
                in_k = ks < K
                if DESCRIPTORS and not GATHER:
                    a = x_desc.load([row0, k0])
                else:
                    inside = present[:, None] & in_k[None, :]
                    a = tl.load(a_ptrs + ks.to(tl.int64)[None, :] * x_col, mask=inside, other=0.0)
                b_ptrs = w_ptrs + ks.to(tl.int64)[:, None] * w_k
                inside = in_k[:, None] & in_f[None, :]
                b = load_half(w_desc, b_ptrs, 0, g, f0, k0, inside, NK, DESCRIPTORS, COLUMNS, DEPTH)
                gate = tl.dot(a, b, gate, input_precision=PRECISION)
                b = load_half(w_desc, b_ptrs + w_half, 1, g, f0, k0, inside, NK, DESCRIPTORS, COLUMNS, DEPTH)
                up = tl.dot(a, b, up, input_precision=PRECISION)
            if BIAS:
                bias_ptrs = bias_ptr + tl.cast(g, tl.int64) * (2 * F) + columns * STEP
                gate += tl.load(bias_ptrs, mask=in_f, other=0.0).to(tl.float32)[None, :]
                up += tl.load(bias_ptrs + half, mask=in_f, other=0.0).to(tl.float32)[None, :]
            dtype = act_ptr.dtype.element_ty
            gate_rounded = gate.to(dtype)  # what backward will see is what the activation sees
            up_rounded = up.to(dtype)
            inside = (rows < end)[:, None] & in_f[None, :]
            if KEEP:
                kept = gate_up_ptr + rows.to(tl.int64)[:, None] * (2 * tl.cast(F, tl.int64))
                if INTERLEAVED:
                    both = 2 * f0 + tl.arange(0, 2 * COLUMNS)
                    mask = (rows < end)[:, None] & (both < 2 * F)[None, :]
                    tl.store(kept + both[None, :], tl.interleave(gate_rounded, up_rounded), mask=mask)
                else:
                    tl.store(kept + columns[None, :], gate_rounded, mask=inside)
                    tl.store(kept + half + columns[None, :], up_rounded, mask=inside)
            act = activation(gate_rounded.to(tl.float32), up_rounded.to(tl.float32), ALPHA, LIMIT, UP_OFFSET)
            if PROBS:
                act *= tl.load(probs_ptr + rows, mask=rows < end, other=0.0).to(tl.float32)[:, None]
            tl.store(act_ptr + rows.to(tl.int64)[:, None] * F + columns[None, :], act.to(dtype), mask=inside)
            tile += tl.num_programs(0)
        first = last
        start = end

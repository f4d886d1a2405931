"""The SwiGLU kernels: Triton's language alone, no torch, so that another framework can launch them.

`reference.py` has the formula. A program walks along F for a few rows, in fp32; rows past the last group are left
alone. `activation` is also the epilogue of the grouped GEMM that makes gate and up.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activation(gate, up, ALPHA: tl.constexpr, LIMIT: tl.constexpr, UP_OFFSET: tl.constexpr):
    """`(up + up_offset) * gate * sigmoid(alpha * gate)` of fp32 blocks, clamped at LIMIT (None: not); NaN stays NaN."""
    if LIMIT is not None:
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up))
    return (up + UP_OFFSET) * gate * tl.sigmoid(ALPHA * gate)


@triton.jit
def load_halves(row_ptrs, f0, F, inside, INTERLEAVED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Gate and up, fp32 `[ROWS, COLUMNS]` each, of columns f0 and on; `inside` masks rows; zero outside."""
    if INTERLEAVED:
        columns = 2 * f0 + tl.arange(0, 2 * COLUMNS)
        both = tl.load(row_ptrs + columns[None, :], mask=inside[:, None] & (columns < 2 * F)[None, :], other=0.0)
        gate, up = both.to(tl.float32).reshape(ROWS, COLUMNS, 2).split()
    else:
        columns = f0 + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (columns < F)[None, :]
        gate = tl.load(row_ptrs + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        up = tl.load(row_ptrs + F + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    return gate, up


@triton.jit
def store_halves(row_ptrs, gate, up, f0, F, inside, INTERLEAVED: tl.constexpr, COLUMNS: tl.constexpr):
    """The counterpart of `load_halves`; gate and up have the dtype of memory."""
    if INTERLEAVED:
        columns = 2 * f0 + tl.arange(0, 2 * COLUMNS)
        mask = inside[:, None] & (columns < 2 * F)[None, :]
        tl.store(row_ptrs + columns[None, :], tl.interleave(gate, up), mask=mask)
    else:
        columns = f0 + tl.arange(0, COLUMNS)
        mask = inside[:, None] & (columns < F)[None, :]
        tl.store(row_ptrs + columns[None, :], gate, mask=mask)
        tl.store(row_ptrs + F + columns[None, :], up, mask=mask)


@triton.jit
def forward_kernel(
    x_ptr,
    probs_ptr,
    out_ptr,
    end_ptr,
    S,
    F,
    x_row,
    ENDS: tl.constexpr,
    PROBS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """`out[s] = probs[s] * activation(gate[s], up[s])`; x `[S, 2F]`, probs `[S]`, out `[S, F]` contiguous."""
    end = tl.load(end_ptr) if ENDS else S
    if tl.program_id(0) * ROWS < end:
        rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        inside = rows < end
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_row
        out_rows = out_ptr + rows.to(tl.int64)[:, None] * F
        for f0 in range(0, F, COLUMNS):
            gate, up = load_halves(x_rows, f0, F, inside, INTERLEAVED, ROWS, COLUMNS)
            out = activation(gate, up, ALPHA, LIMIT, UP_OFFSET)
            if PROBS:
                out *= tl.load(probs_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
            columns = f0 + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (columns < F)[None, :]
            tl.store(out_rows + columns[None, :], out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward_kernel(
    grad_ptr,
    x_ptr,
    probs_ptr,
    grad_x_ptr,
    grad_probs_ptr,
    end_ptr,
    S,
    F,
    grad_row,
    x_row,
    ENDS: tl.constexpr,
    PROBS: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    UP_OFFSET: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Gradients of x `[S, 2F]`, contiguous, and of probs `[S]`: a row's sum over F, in one order; zero past the end.

    With `a = sigmoid(alpha * gate)` and the clamped gate and up: d_up = grad * p * gate * a and
    d_gate = grad * p * (up + up_offset) * a * (1 + alpha * gate * (1 - a)); what is clamped has none.
    """
    end = tl.load(end_ptr) if ENDS else S
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rows < end
    sums = tl.zeros((ROWS,), dtype=tl.float32)
    if tl.program_id(0) * ROWS < end:
        grad_rows = grad_ptr + rows.to(tl.int64)[:, None] * grad_row
        x_rows = x_ptr + rows.to(tl.int64)[:, None] * x_row
        grad_x_rows = grad_x_ptr + rows.to(tl.int64)[:, None] * (2 * tl.cast(F, tl.int64))
        for f0 in range(0, F, COLUMNS):
            columns = f0 + tl.arange(0, COLUMNS)
            mask = inside[:, None] & (columns < F)[None, :]
            grad = tl.load(grad_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
            raw_gate, raw_up = load_halves(x_rows, f0, F, inside, INTERLEAVED, ROWS, COLUMNS)
            gate, up = raw_gate, raw_up
            if LIMIT is not None:
                gate = tl.where(raw_gate > LIMIT, LIMIT, raw_gate)
                up = tl.where(raw_up > LIMIT, LIMIT, tl.where(raw_up < -LIMIT, -LIMIT, raw_up))
            up += UP_OFFSET
            a = tl.sigmoid(ALPHA * gate)
            if PROBS:
                sums += tl.sum(grad * (up * gate * a), axis=1)
                grad *= tl.load(probs_ptr + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
            grad_up = grad * gate * a
            grad_gate = grad * up * a * (1 + ALPHA * gate * (1 - a))
            if LIMIT is not None:
                grad_gate = tl.where(raw_gate > LIMIT, 0.0, grad_gate)
                grad_up = tl.where((raw_up > LIMIT) | (raw_up < -LIMIT), 0.0, grad_up)
            dtype = grad_x_ptr.dtype.element_ty
            store_halves(grad_x_rows, grad_gate.to(dtype), grad_up.to(dtype), f0, F, inside, INTERLEAVED, COLUMNS)
    if PROBS:
        tl.store(grad_probs_ptr + rows, sums.to(grad_probs_ptr.dtype.element_ty), mask=rows < S)

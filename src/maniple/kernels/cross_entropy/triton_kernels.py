"""The cross-entropy kernels: Triton's language alone, no torch. `reference.py` has the formulas.

A program has a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

_LEAST = tl.constexpr(-3.0e38)  # finite, so that a difference to it is a number


@triton.jit
def statistics_kernel(logits_ptr, labels_ptr, lse_ptr, target_ptr, V, row_stride, COLUMNS: tl.constexpr):
    """Log-sum-exp and the label's logit of a row of `[C, V]`; each lane keeps a maximum and a sum of its own."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    most = tl.full([COLUMNS], _LEAST, tl.float32)
    total = tl.zeros([COLUMNS], tl.float32)
    for v0 in range(0, V, COLUMNS):
        columns = v0 + tl.arange(0, COLUMNS)
        x = tl.load(row_ptr + columns, mask=columns < V, other=float("-inf")).to(tl.float32)
        higher = tl.where(x > most, x, most)
        total = total * tl.exp(most - higher) + tl.exp(x - higher)
        most = higher
    top = tl.max(most, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    label = tl.load(labels_ptr + row)
    here = (label >= 0) & (label < V)
    target = tl.load(row_ptr + label, mask=here, other=0.0).to(tl.float32)
    tl.store(lse_ptr + row, lse)
    tl.store(target_ptr + row, target)


@triton.jit
def gradient_kernel(logits_ptr, labels_ptr, lse_ptr, grad_ptr, V, row_stride, COLUMNS: tl.constexpr):
    """Puts `grad * (exp(logits - lse) - [label])` in the place of the logits."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * row_stride
    label = tl.load(labels_ptr + row)
    lse = tl.load(lse_ptr + row)
    grad = tl.load(grad_ptr + row)
    for v0 in range(0, V, COLUMNS):
        columns = v0 + tl.arange(0, COLUMNS)
        x = tl.load(row_ptr + columns, mask=columns < V, other=0.0).to(tl.float32)
        p = tl.exp(x - lse) - tl.where(columns == label, 1.0, 0.0)
        tl.store(row_ptr + columns, (p * grad).to(logits_ptr.dtype.element_ty), mask=columns < V)

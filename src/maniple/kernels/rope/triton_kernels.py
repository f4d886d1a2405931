"""The rotary kernel: Triton's language alone, no torch. `reference.py` has the formula.

A program has some heads of one token, which lie anywhere in memory; the result is contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    out_ptr,
    B,
    H,
    D,
    R,
    x_s,
    x_b,
    x_h,
    x_d,
    BACK: tl.constexpr,
    REST: tl.constexpr,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """x: `[S, B, H, D]` with four strides; cos, sin: `[S, R]`. REST: columns past 2 R in each head, at most."""
    token = tl.program_id(0).to(tl.int64)
    s, b = token // B, token % B
    h_H1 = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i_1R = tl.arange(0, PAIRS)[None, :]
    mask = (h_H1 < H) & (i_1R < R)
    cos_1R = tl.load(cos_ptr + s * R + i_1R, mask=i_1R < R, other=0.0)
    sin_1R = tl.load(sin_ptr + s * R + i_1R, mask=i_1R < R, other=0.0)
    if BACK:
        sin_1R = -sin_1R
    from_H1 = x_ptr + s * x_s + b * x_b + h_H1.to(tl.int64) * x_h
    to_H1 = out_ptr + (token * H + h_H1) * D
    a = tl.load(from_H1 + i_1R * x_d, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(from_H1 + (R + i_1R) * x_d, mask=mask, other=0.0).to(tl.float32)
    tl.store(to_H1 + i_1R, (a * cos_1R - c * sin_1R).to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(to_H1 + R + i_1R, (c * cos_1R + a * sin_1R).to(out_ptr.dtype.element_ty), mask=mask)
    if REST:
        i_1C = 2 * R + tl.arange(0, REST)[None, :]
        rest = (h_H1 < H) & (i_1C < D)
        tl.store(to_H1 + i_1C, tl.load(from_H1 + i_1C * x_d, mask=rest), mask=rest)

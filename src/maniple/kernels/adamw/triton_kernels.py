"""The AdamW kernel: Triton's language alone, no torch, so that another framework can launch it.

`reference.py` has the formula. Everything is read once and written once, and each element by one program.
"""

from __future__ import annotations

import triton
import triton.language as tl

from maniple.kernels.adamw.launch import FACTORS, SECOND, SHIFTS

_SHIFT1, _SHIFT2, _SHIFT3 = (tl.constexpr(shift) for shift in SHIFTS)
_FACTOR1, _FACTOR2 = (tl.constexpr(factor) for factor in FACTORS)
_SECOND = tl.constexpr(SECOND)


@triton.jit
def mixed(word):
    """A bijection of uint32 words: see `launch.py`."""
    word = (word ^ (word >> _SHIFT1)) * tl.full((), _FACTOR1, tl.uint32)
    word = (word ^ (word >> _SHIFT2)) * tl.full((), _FACTOR2, tl.uint32)
    return word ^ (word >> _SHIFT3)


@triton.jit
def rounded(x, noise):
    """fp32 that is exact in bf16: bits of x plus noise, cut off; NaN and infinity stay."""
    bits = x.to(tl.uint32, bitcast=True)
    finite = (bits & 0x7F800000) != 0x7F800000
    cut = ((bits + noise) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return tl.where(finite, cut, x)


@triton.jit
def nearest(x):
    """fp32 that is exact in bf16: the nearest, ties to even."""
    bits = x.to(tl.uint32, bitcast=True)
    return rounded(x, 0x7FFF + ((bits >> 16) & 1))


@triton.jit(do_not_specialize=["key", "first"])
def update_kernel(
    grad_ptr,
    main_ptr,
    exp_avg_ptr,
    exp_avg_sq_ptr,
    model_ptr,
    scale_ptr,
    N,
    first,
    key,
    scale,
    beta1,
    rest1,
    beta2,
    rest2,
    decay,
    step_size,
    root,
    epsilon,
    BLOCK: tl.constexpr,
):
    """One block of a flat shard of N elements, whose first is number `first` of its tensor.

    model_ptr: bf16, or None. The gradient is multiplied by `scale`, and by what scale_ptr (fp32, or None) holds.
    """
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < N
    g = tl.load(grad_ptr + offsets, mask=inside, other=0.0).to(tl.float32) * scale
    if scale_ptr is not None:
        g *= tl.load(scale_ptr)
    # Of a sum of two products a compiler fuses either, for one element of eight the other: then bits would depend on N.
    m = tl.fma(rest1, g, beta1 * tl.load(exp_avg_ptr + offsets, mask=inside, other=0.0).to(tl.float32))
    v = tl.fma(rest2 * g, g, beta2 * tl.load(exp_avg_sq_ptr + offsets, mask=inside, other=0.0).to(tl.float32))
    p = decay * tl.load(main_ptr + offsets, mask=inside, other=0.0).to(tl.float32)
    p -= step_size * m / (tl.sqrt(v) * root + epsilon)
    if model_ptr is not None:
        tl.store(model_ptr + offsets, nearest(p).to(model_ptr.dtype.element_ty), mask=inside)
    MAIN: tl.constexpr = main_ptr.dtype.element_ty == tl.bfloat16
    AVG: tl.constexpr = exp_avg_ptr.dtype.element_ty == tl.bfloat16
    SQ: tl.constexpr = exp_avg_sq_ptr.dtype.element_ty == tl.bfloat16
    if MAIN or AVG or SQ:
        index = offsets + first
        word = mixed(index.to(tl.uint32) ^ key.to(tl.uint32))
        word = mixed(word ^ ((index >> 32).to(tl.uint32) * tl.full((), _SECOND, tl.uint32)))
        if MAIN:
            p = rounded(p, word & 0xFFFF)
        if AVG:
            m = rounded(m, word >> 16)
        if SQ:
            v = rounded(v, mixed(word ^ tl.full((), _SECOND, tl.uint32)) & 0xFFFF)
    tl.store(main_ptr + offsets, p.to(main_ptr.dtype.element_ty), mask=inside)
    tl.store(exp_avg_ptr + offsets, m.to(exp_avg_ptr.dtype.element_ty), mask=inside)
    tl.store(exp_avg_sq_ptr + offsets, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=inside)

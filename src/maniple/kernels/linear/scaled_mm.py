"""The low-precision linear layer by PyTorch's own float8 product, for one scale a tensor. Not yet run on a GPU.

The functions have the interface of `reference.py`. Sums are taken over in fp32 (`use_fast_accum` off), since the tensor
cores of Hopper keep some 14 bits of them.
"""

from __future__ import annotations

import torch

from maniple.kernels import chips
from maniple.kernels.quantize import Quantized
from maniple.kernels.quantize.quantized import FNUZ

_MULTIPLE = 16  # of both dimensions of a matrix: what cuBLASLt and hipBLASLt take


def rows(
    x: Quantized, w: Quantized, ends_G: torch.Tensor, *, bias_N: torch.Tensor | None = None, out_dtype: torch.dtype
) -> torch.Tensor:
    """As the reference's."""
    out_SN = _product(x, Quantized(w.data[0], w.scales[0], w.block), out_dtype)
    return out_SN if bias_N is None else out_SN + bias_N


def wgrad(
    grad: Quantized,
    x: Quantized,
    ends_G: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    out_1NK: torch.Tensor | None = None,
) -> torch.Tensor:
    """As the reference's."""
    made_1NK = _product(grad, x, out_dtype if out_1NK is None else torch.float32)[None]
    return made_1NK if out_1NK is None else out_1NK.add_(made_1NK)


def _product(a: Quantized, b: Quantized, out_dtype: torch.dtype) -> torch.Tensor:
    """`a @ bᵀ`; zeros where there is nothing to sum."""
    if not a.data.numel() or not b.data.numel():
        return torch.zeros(a.data.shape[0], b.data.shape[0], dtype=out_dtype, device=a.data.device)
    scales = a.scales.reshape(()), b.scales.reshape(())
    return torch._scaled_mm(a.data, b.data.t(), *scales, out_dtype=out_dtype, use_fast_accum=False)


def no_scaled_mm() -> str | None:
    """Why it cannot run in this process; None if it can."""
    here = chips.chip()
    if here in ("gfx942", "gfx950") or (here.startswith("sm_") and int(here[3:]) >= 89):
        return None
    return f"needs a GPU that multiplies float8 (sm_89 or later, gfx942, gfx950), and this is {here or 'no GPU'}"


def refusal(result: torch.dtype, n: int, k: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> str | None:
    """Why forward and both gradients cannot run here, for results of a dtype and numbers of two; None if they can."""
    if result != torch.bfloat16:
        return f"computes bf16 results, not {str(result).removeprefix('torch.')}"
    if k % _MULTIPLE or n % _MULTIPLE:
        return f"needs K and N multiples of {_MULTIPLE}, and they are {k} and {n}"
    fnuz = chips.chip() == "gfx942"
    if any((kind in FNUZ) != fnuz for kind in (dtype, grad_dtype)):
        return f"multiplies {'FNUZ' if fnuz else 'OCP'} float8 on {chips.chip()}, not {dtype} and {grad_dtype}"
    if dtype == grad_dtype == torch.float8_e5m2:
        return "multiplies no two matrices of float8_e5m2"
    return None

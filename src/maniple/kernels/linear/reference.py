"""Oracle of the low-precision linear layer: the quantized values in fp32, one product, rounded once.

What these two functions take and return is the interface of every implementation. Shapes: S rows, K the contraction of
forward, N columns of the result; P the rows of a transposed operand: S, rounded up to 128 with zeros where it is
quantized. An operand without scales (emulated mxfp8) is a plain tensor.
"""

from __future__ import annotations

import torch

from maniple.kernels.quantize import Quantized, dequantize, require_one_encoding

type Operand = Quantized | torch.Tensor


def rows(
    x: Operand, w: Operand, ends_G: torch.Tensor, *, bias_N: torch.Tensor | None = None, out_dtype: torch.dtype
) -> torch.Tensor:
    """`x @ wᵀ + bias`, `[S, N]` in `out_dtype`. The gradient of x is the same product, of a gradient and a turned w.

    x: `[S, K]`. w: `[1, N, K]`. ends_G: int32 `[1]` on the device, S: of the one group there is.
    """
    x_SK, w_NK = _values(x, w)
    out_SN = x_SK @ w_NK[0].t()
    if bias_N is not None:
        out_SN = out_SN + bias_N.float()
    return out_SN.to(out_dtype)


def wgrad(
    grad: Operand,
    x: Operand,
    ends_G: torch.Tensor,
    *,
    out_dtype: torch.dtype,
    out_1NK: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of w, `grad @ xᵀ`: `[1, N, K]` in `out_dtype`, or added, once, to `out_1NK`.

    grad: `[N, P]`. x: `[K, P]`. ends_G: int32 `[1]` on the device, P.
    """
    grad_NP, x_KP = _values(grad, x)
    made_1NK = (grad_NP @ x_KP.t())[None]
    return made_1NK.to(out_dtype) if out_1NK is None else out_1NK.add_(made_1NK)


def _values(*operands: Operand) -> list[torch.Tensor]:
    require_one_encoding(*(operand for operand in operands if isinstance(operand, Quantized)))
    return [dequantize(o, torch.float32) if isinstance(o, Quantized) else o.float() for o in operands]

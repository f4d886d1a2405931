"""Oracle of the low-precision grouped GEMM: the quantized values in fp32, a loop over groups, rounded once.

What these two functions take and return is the interface of every implementation. Shapes: S rows, G groups, K the
contraction, N columns of the result; P the padded rows of `kernels.quantize.Rows.columnwise`.
"""

from __future__ import annotations

import torch

from maniple.kernels.grouped_gemm import reference
from maniple.kernels.quantize import Quantized, dequantize, require_one_encoding

bias_grad = reference.bias_grad


def rows(
    x: Quantized,
    w: Quantized,
    ends_G: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """`out[s] = x[s] @ w[g]ᵀ + bias_scale[s] * bias[g]` for every row s of group g; `[S, N]` in `out_dtype`.

    x: `[S, K]`. w: `[G, N, K]`. Both have the contraction last: forward multiplies by `Weight.forward`, the gradient of
    x by `Weight.dgrad`. ends_G, bias, tail and splits: as the bf16 `grouped_gemm`'s.
    """
    require_one_encoding(x, w)
    out_SN = reference.forward(
        dequantize(x, torch.float32),
        dequantize(w, torch.float32),
        ends_G,
        bias_GN=bias_GN,
        bias_scale_S=bias_scale_S,
        zero_tail=zero_tail,
        splits=splits,
    )
    return out_SN.to(out_dtype)


def wgrad(
    grad: Quantized,
    x: Quantized,
    padded_ends_G: torch.Tensor,
    *,
    layout: str = "nk",
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """Gradient of w: `grad[:, columns of g] @ x[:, columns of g]ᵀ`, `[G, N, K]` ("nk") or its transpose ("kn").

    grad: `[N, P]`, x: `[K, P]`, columns of groups as `padded_ends_G` says. Exactly zero for an empty group. Written to
    `out` or to a new tensor of `out_dtype`. `accumulate` adds to `out`, once; then an empty group leaves its part of
    `out` as it was. Raises ValueError for `accumulate` without `out`.
    """
    require_one_encoding(grad, x)
    grad_PN, x_PK = (dequantize(operand, torch.float32).t() for operand in (grad, x))
    if out is None:
        return reference.wgrad(x_PK, grad_PN, padded_ends_G, layout=layout, accumulate=accumulate).to(out_dtype)
    return reference.wgrad(x_PK, grad_PN, padded_ends_G, layout=layout, out=out, accumulate=accumulate)

"""mxfp8 on chips without block-scaled matrix instructions: bf16 products of numbers that mxfp8 has too.

A float8 number times a power of two is exact in bf16, so the products are mxfp8's own; speed and memory are bf16's.
The functions have the interface of `low_precision_reference.py`, with bf16 tensors in the place of quantized ones:
`[S, K]`, weights `[G, N, K]` or a transposed view, and views `[N, S]` and `[K, S]` whose groups are not padded. What
multiplies is the bf16 grouped GEMM that serves them best.
"""

from __future__ import annotations

from typing import Any

import torch

from maniple.kernels import registry


def rows(
    x_SK: torch.Tensor,
    w_GNK: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """As the reference's; `out_dtype` is x's."""
    turned = w_GNK.stride(2) != 1
    w_G, layout = (w_GNK.transpose(1, 2), "kn") if turned else (w_GNK, "nk")
    bias: dict[str, Any] = dict(bias_GN=bias_GN, bias_scale_S=bias_scale_S)
    fn = _bf16(x_SK, w_G, layout)
    return fn.forward(x_SK, w_G, ends_G, **bias, layout=layout, zero_tail=zero_tail, splits=splits).to(out_dtype)


def wgrad(
    grad_NS: torch.Tensor,
    x_KS: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    layout: str = "nk",
    out_dtype: torch.dtype = torch.bfloat16,
    out: torch.Tensor | None = None,
    accumulate: bool = False,
) -> torch.Tensor:
    """As the reference's; a new result has x's dtype."""
    grad_SN, x_SK = grad_NS.t(), x_KS.t()
    fn = _bf16(x_SK, None, layout, grad_SN.shape[1])
    return fn.wgrad(x_SK, grad_SN, ends_G, layout=layout, out=out, accumulate=accumulate)


def bias_grad(
    grad_SN: torch.Tensor,
    ends_G: torch.Tensor,
    bias_GN: torch.Tensor,
    bias_scale_S: torch.Tensor | None,
    *,
    splits: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference's."""
    fn = registry.use("grouped_gemm", "bf16", grad_SN.device.type)
    return fn.bias_grad(grad_SN, ends_G, bias_GN, bias_scale_S, splits=splits)


def _bf16(x_SK: torch.Tensor, w_G: torch.Tensor | None, layout: str, grad_columns: int = 8) -> Any:
    """What multiplies; without w, for a weight gradient, with a gradient of so many columns."""
    operands = x_SK, w_G, layout, False, "stacked", grad_columns
    return registry.use("grouped_gemm", "bf16", x_SK.device.type, None, operands)

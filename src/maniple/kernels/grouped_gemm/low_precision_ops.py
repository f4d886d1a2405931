"""The operators of the low-precision grouped GEMM, as functions and by their names (`torch.ops.maniple.quantized_…`).

They take operands as tensors, data and scales apart; without scales (emulated mxfp8) the data are bf16.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from maniple.kernels import custom_ops, registry
from maniple.kernels.grouped_gemm import ops
from maniple.kernels.quantize import Quantized
from maniple.kernels.quantize.formats import RECIPES

OP = "quantized_grouped_gemm"
type Operand = Quantized | torch.Tensor


def split(operand: Operand | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """An operand's tensors, as autograd and operators take them."""
    return (operand.data, operand.scales) if isinstance(operand, Quantized) else (operand, None)


def rows(
    x, x_scales, w, w_scales, ends_G, bias_GN, bias_scale_S, out_dtype, zero_tail, splits, recipe, kernels
) -> torch.Tensor:
    """`maniple::quantized_grouped_gemm`: `[S, N]`."""
    return registry.use(OP, recipe, x.device.type, kernels).rows(
        join(x, x_scales, RECIPES[recipe].rows),
        join(w, w_scales, RECIPES[recipe].weight),
        ends_G,
        out_dtype=out_dtype,
        bias_GN=bias_GN,
        bias_scale_S=bias_scale_S,
        zero_tail=zero_tail,
        splits=splits,
    )


def wgrad(grad, grad_scales, x, x_scales, ends_G, layout, out_dtype, recipe, kernels) -> torch.Tensor:
    """`maniple::quantized_wgrad`: gradient of the weights in their layout."""
    operands = _turned(grad, grad_scales, x, x_scales, recipe)
    return registry.use(OP, recipe, x.device.type, kernels).wgrad(*operands, ends_G, layout=layout, out_dtype=out_dtype)


def wgrad_into(grad, grad_scales, x, x_scales, ends_G, layout, out_G, accumulate, recipe, kernels) -> None:
    """`maniple::quantized_wgrad_into`: writes the gradient of the weights to `out_G`, or adds it there, once."""
    operands = _turned(grad, grad_scales, x, x_scales, recipe)
    implementation = registry.use(OP, recipe, x.device.type, kernels)
    implementation.wgrad(*operands, ends_G, layout=layout, out=out_G, accumulate=accumulate)


def bias_grad(grad_SN, ends_G, bias_GN, bias_scale_S, splits, recipe, kernels) -> tuple[torch.Tensor, torch.Tensor]:
    """`maniple::quantized_bias_grad`: gradients of the bias `[G, N]` and of its scale `[S]` (`[0]` without one)."""
    implementation = registry.use(OP, recipe, grad_SN.device.type, kernels)
    grad_bias_GN, grad_scale_S = implementation.bias_grad(grad_SN, ends_G, bias_GN, bias_scale_S, splits=splits)
    return grad_bias_GN, grad_SN.new_empty(0) if grad_scale_S is None else grad_scale_S


def operators_for(tensor: torch.Tensor) -> Any:
    """`rows`, `wgrad`, `wgrad_into`, `bias_grad`, `gather_sum`: by name where something looks at operators."""
    return _NAMED if custom_ops.named(tensor) else _DIRECT


def join(data: torch.Tensor, scales: torch.Tensor | None, side: int) -> Operand:
    """The operand of what `split` gave; side: of its blocks."""
    if scales is None:
        return data
    return Quantized(data, scales, (1 if side and data.dim() == 2 else side, side))


def _turned(grad, grad_scales, x, x_scales, recipe: str) -> tuple[Operand, Operand]:
    return join(grad, grad_scales, RECIPES[recipe].rows), join(x, x_scales, RECIPES[recipe].rows)


def _empty_rows(x, x_scales, w, w_scales, ends, bias, bias_scale, out_dtype, zero_tail, splits, recipe, kernels):
    return x.new_empty(x.shape[0], w.shape[1], dtype=out_dtype)


def _empty_wgrad(grad, grad_scales, x, x_scales, ends, layout, out_dtype, recipe, kernels):
    n, k = grad.shape[0], x.shape[0]
    return x.new_empty(ends.shape[0], *((n, k) if layout == "nk" else (k, n)), dtype=out_dtype)


def _empty_bias_grad(grad, ends, bias, bias_scale, splits, recipe, kernels):
    made = torch.empty_like(bias, memory_format=torch.contiguous_format)
    if bias_scale is None:
        return made, grad.new_empty(0)
    return made, torch.empty_like(bias_scale, memory_format=torch.contiguous_format)


_TURNED = "Tensor grad, Tensor? grad_scales, Tensor x, Tensor? x_scales, Tensor ends, str layout"
custom_ops.define(
    "quantized_grouped_gemm(Tensor x, Tensor? x_scales, Tensor w, Tensor? w_scales, Tensor ends, Tensor? bias, "
    "Tensor? bias_scale, ScalarType out_dtype, bool zero_tail, int[]? splits, str recipe, str kernels) -> Tensor",
    rows,
    _empty_rows,
)
custom_ops.define(
    f"quantized_wgrad({_TURNED}, ScalarType out_dtype, str recipe, str kernels) -> Tensor", wgrad, _empty_wgrad
)
custom_ops.define(
    f"quantized_wgrad_into({_TURNED}, Tensor(a!) out, bool accumulate, str recipe, str kernels) -> ()",
    wgrad_into,
    lambda *arguments: None,
)
custom_ops.define(
    "quantized_bias_grad(Tensor grad, Tensor ends, Tensor bias, Tensor? bias_scale, int[]? splits, str recipe, "
    "str kernels) -> (Tensor, Tensor)",
    bias_grad,
    _empty_bias_grad,
)
_DIRECT = SimpleNamespace(rows=rows, wgrad=wgrad, wgrad_into=wgrad_into, bias_grad=bias_grad, gather_sum=ops.gather_sum)
_NAMED = SimpleNamespace(
    rows=torch.ops.maniple.quantized_grouped_gemm,
    wgrad=torch.ops.maniple.quantized_wgrad,
    wgrad_into=torch.ops.maniple.quantized_wgrad_into,
    bias_grad=torch.ops.maniple.quantized_bias_grad,
    gather_sum=torch.ops.maniple.grouped_gemm_gather_sum,
)

"""Quantized grouped GEMM and SwiGLU behind it, whose result the next quantized product takes.

Where there are kernels for it, the activation is written quantized only, and its gradient too: between the products
nothing is in bf16 but gate and up, which backward needs, and the gradient of the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from maniple.kernels import custom_ops, registry
from maniple.kernels.grouped_gemm.low_precision import quantized_grouped_gemm
from maniple.kernels.grouped_gemm.ops import activation_again
from maniple.kernels.quantize.passed import Passed
from maniple.kernels.swiglu import quantized, swiglu


def quantized_grouped_gemm_swiglu(
    x_SK: torch.Tensor,
    w_G2FK: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    probs_S: torch.Tensor,
    recipe: str,
    dtype: torch.dtype,
    bias_G2F: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    gate_up: str = "stacked",
    turned: bool = True,
    kernels: str | None = None,
    **settings: Any,
) -> tuple[torch.Tensor, Passed | None]:
    """`swiglu(quantized_grouped_gemm(x, w))`, `[S, F]`, and None; or a stand-in for it, and the `passed_x` of the
    product that takes it, in the same recipe and dtype.

    turned: that product's weight needs a gradient. The other arguments are those of the two functions.
    """
    made = grad = name = None
    if bias_G2F is None and (alpha, limit, up_offset, gate_up) == (1.0, None, 0.0, "stacked"):
        name = _fused(x_SK, w_G2FK, probs_S, recipe, dtype, kernels)
    if name is not None:
        made, grad = Passed(True, turned), Passed(False, False)
    gate_up_S2F = quantized_grouped_gemm(
        x_SK,
        w_G2FK,
        ends_G,
        bias_GN=bias_G2F,
        recipe=recipe,
        dtype=dtype,
        kernels=kernels,
        passed_grad=grad,
        **settings,
    )
    if made is not None and grad is not None and name is not None:
        act = quantized.quantized_swiglu(
            gate_up_S2F, probs_S, ends_G, recipe=recipe, dtype=dtype, made=made, grad=grad, kernels=name
        )
        return act, made
    form: Any = dict(alpha=alpha, limit=limit, up_offset=up_offset, layout=gate_up, kernels=kernels)
    return swiglu(gate_up_S2F, probs_S, ends_G=ends_G, **form), None


def kept_again(
    act_SF: torch.Tensor, passed: Passed | None
) -> tuple[list[torch.Tensor], Callable[[], list[torch.Tensor]]] | None:
    """What the next product would keep of the activation, and what computes the same again from gate and up.

    To ask before that product runs. passed: as `quantized_grouped_gemm_swiglu` gave it, or None. None: nothing is kept.
    """
    if passed is not None:
        columns = None if passed.rows is None else passed.rows.columnwise
        again = quantized.columns_again(act_SF)
        return None if columns is None or again is None else ([columns.data, columns.scales], again)
    one = activation_again(act_SF)
    return None if one is None else ([act_SF], lambda: [one()])


@torch.compiler.assume_constant_result
def _fused(
    x_SK: torch.Tensor,
    w_G2FK: torch.Tensor,
    probs_S: torch.Tensor,
    recipe: str,
    dtype: torch.dtype,
    kernels: str | None,
) -> str | None:
    """The kernels of a quantized SwiGLU, where there are some for these operands; those who look at operators see the
    two that there are names for."""
    if custom_ops.named(x_SK) or kernels not in (None, "auto", "hopper"):
        return None
    operands = x_SK.dtype, x_SK.shape[0], w_G2FK.shape[1] // 2, probs_S.dtype, dtype
    name = registry.select(quantized.OP, recipe, x_SK.device.type, None, operands).name
    return None if name == "reference" else name

"""A linear layer on quantized numbers: `quantized_linear`, differentiable. Recipes: "fp8", "fp8_block", "mxfp8".

As in the grouped GEMM each tensor is quantized once, in both of its orientations, all three products sum in fp32, and
backward keeps transposed copies of x and the weight in float8 and no bf16 x. What multiplies is a grouped GEMM of one
group, so that its kernels serve here too, or PyTorch's own product where one scale a tensor is asked for.

An implementation is an object with the functions of `reference.py`; one that does not serve all operands says so with
`refusal(x's dtype, N, K, dtype, grad_dtype)`. "grouped" takes the best implementation of the grouped GEMM.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from maniple.kernels import main_grad, registry
from maniple.kernels.grouped_gemm import low_precision
from maniple.kernels.grouped_gemm.low_precision_ops import join, split
from maniple.kernels.linear import reference, scaled_mm
from maniple.kernels.linear.grouped import Grouped
from maniple.kernels.quantize import QuantizedWeight
from maniple.kernels.quantize.formats import RECIPES

__all__ = ["Exchange", "choose", "quantized_linear"]

OP = "quantized_linear"
registry.register(OP, "reference", RECIPES, registry.ANY_DEVICE, reference)
registry.register(OP, "grouped", RECIPES, registry.ANY_DEVICE, Grouped, preference=1)
registry.register(
    OP,
    "scaled_mm",
    {"fp8"},
    {"cuda"},
    scaled_mm,
    preference=2,
    reason_unavailable=scaled_mm.no_scaled_mm,
    refuses=scaled_mm.refusal,
)


class Exchange(Protocol):
    """What a linear layer whose rows or columns are cut over ranks sends, around its products."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """In forward: what is multiplied, `[..., K]`, of this rank's part of it."""
        ...

    def reduce(self, grad: torch.Tensor) -> Callable[[], torch.Tensor]:
        """In backward: starts to sum the gradients of what was multiplied. The result is called once the weight's
        gradient has been computed, and returns the gradient of this rank's part."""
        ...


def quantized_linear(
    x: torch.Tensor,
    w_NK: torch.Tensor,
    *,
    recipe: str,
    bias_N: torch.Tensor | None = None,
    fuse_wgrad_accumulation: bool = False,
    weight_cache: QuantizedWeight | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    grad_dtype: torch.dtype | None = None,
    rounding: Literal["rceil", "floor"] = "rceil",
    exchange: Exchange | None = None,
    kernels: str | None = None,
) -> torch.Tensor:
    """`x @ wᵀ + bias` with its three products in float8; `[..., N]` in x's dtype.

    x: `[..., K]` bf16 or fp32. w_NK: `[N, K]`, x's dtype. bias_N: `[N]`. Any K and N. recipe: "fp8", "fp8_block" or
    "mxfp8". dtype: of x and the weight; grad_dtype: of the result's gradient (None: the same). rounding: of mxfp8's
    scales. weight_cache: keeps the quantized weight between optimizer steps (settings as here); emulated mxfp8 does not
    use it. kernels: an implementation's name, or None or "auto" for the best that serves these operands.

    fuse_wgrad_accumulation: as `grouped_gemm`'s, into `w_NK.main_grad`. exchange: what is sent before and after the
    products where x is cut over ranks; x is then this rank's part of what is multiplied.

    Raises UserError if no implementation serves the recipe here, ValueError for operands that do not agree.
    """
    if w_NK.dim() != 2 or not x.dim() or x.shape[-1] != w_NK.shape[1] or x.dtype != w_NK.dtype:
        raise ValueError(
            f"quantized_linear needs x [..., K] and w [N, K] of one dtype, not {x.dtype} {list(x.shape)} and "
            f"{w_NK.dtype} {list(w_NK.shape)}"
        )
    if bias_N is not None and bias_N.shape != w_NK.shape[:1]:
        raise ValueError(f"bias needs shape [{w_NK.shape[0]}], not {list(bias_N.shape)}")
    if fuse_wgrad_accumulation and getattr(w_NK, "main_grad", None) is None:
        raise ValueError("fuse_wgrad_accumulation needs a weight with a main_grad")
    grad_dtype = dtype if grad_dtype is None else grad_dtype
    name, inner = _use(w_NK, recipe, dtype, grad_dtype, kernels)
    product = Grouped(recipe, inner) if inner is not None else {"reference": reference, "scaled_mm": scaled_mm}[name]
    quantizer = low_precision.Quantizer(recipe, "nk", rounding, weight_cache, emulate=inner == "emulated")
    settings = _Settings(quantizer, dtype, grad_dtype, product, fuse_wgrad_accumulation, exchange)
    return _QuantizedLinear.apply(x, w_NK, bias_N, settings)


def choose(
    w_NK: torch.Tensor,
    recipe: str,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    grad_dtype: torch.dtype | None = None,
    kernels: str | None = None,
) -> tuple[str, str | None]:
    """The name of what computes `quantized_linear` with this weight, and with "grouped" that of the grouped GEMM's.

    Raises UserError if nothing can.
    """
    n, k = w_NK.shape
    operands = w_NK.dtype, n, k, dtype, dtype if grad_dtype is None else grad_dtype
    name = registry.select(OP, recipe, w_NK.device.type, kernels, operands).name
    if name != "grouped":
        return name, None
    return name, registry.select(low_precision.OP, recipe, w_NK.device.type, None, operands).name


@torch.compiler.assume_constant_result
def _use(w_NK: torch.Tensor, recipe: str, dtype, grad_dtype, kernels: str | None) -> tuple[str, str | None]:
    """`choose`, noted for `registry.used()`. A compiled graph keeps it, since it depends on no value."""
    name, inner = choose(w_NK, recipe, dtype=dtype, grad_dtype=grad_dtype, kernels=kernels)
    registry.use(OP, recipe, w_NK.device.type, name)
    return name, inner


@dataclass(frozen=True)
class _Settings:
    quantizer: low_precision.Quantizer
    dtype: torch.dtype
    grad_dtype: torch.dtype
    product: Any
    fuse: bool
    exchange: Exchange | None


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w_NK, bias_N, settings):
        needs_x, needs_w = ctx.needs_input_grad[:2]
        whole = x if settings.exchange is None else settings.exchange.gather(x)
        x_SK = whole.reshape(-1, whole.shape[-1])
        ends_G = torch.full((1,), x_SK.shape[0], dtype=torch.int32, device=x.device)
        quantizer = settings.quantizer
        x_along, x_turned, turned_ends_G = quantizer.rows(x_SK, ends_G, settings.dtype, True, needs_w)
        w, w_turned = quantizer.weight(w_NK[None], settings.dtype, needs_x)
        # emulated weights are made anew in backward: kept they would cost a copy of the weight in bf16
        kept_w = (w_NK, None) if quantizer.emulate else split(w_turned if needs_x else None)
        ctx.settings, ctx.main, ctx.w_dtype = settings, w_NK if settings.fuse else None, w_NK.dtype
        ctx.whole_shape, ctx.bias_dtype = whole.shape, None if bias_N is None else bias_N.dtype
        ctx.save_for_backward(ends_G, turned_ends_G, *split(x_turned), *kept_w)
        out_SN = settings.product.rows(x_along, w, ends_G, bias_N=bias_N, out_dtype=x.dtype)
        return out_SN.view(*whole.shape[:-1], w_NK.shape[0])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        ends_G, turned_ends_G, x, x_scales, w, w_scales = ctx.saved_tensors
        settings, quantizer, main = ctx.settings, ctx.settings.quantizer, ctx.main
        blocks = RECIPES[quantizer.recipe]
        needs_x, needs_w, needs_bias = ctx.needs_input_grad[:3]
        grad_SN = grad.reshape(-1, grad.shape[-1])
        along = turned = grad_x = grad_w_NK = grad_bias_N = None
        if needs_x or needs_w:
            along, turned, _ = quantizer.rows(grad_SN, ends_G, settings.grad_dtype, needs_x, needs_w)
        if needs_x:
            if quantizer.emulate:
                w_turned = quantizer.weight(w[None], settings.dtype, True)[1]
            else:
                w_turned = join(w, w_scales, blocks.weight)
            grad_x = settings.product.rows(along, w_turned, ends_G, out_dtype=grad.dtype).view(ctx.whole_shape)
            received = None if settings.exchange is None else settings.exchange.reduce(grad_x)
        if needs_w:
            operands = turned, join(x, x_scales, blocks.rows), turned_ends_G
            if settings.fuse:
                settings.product.wgrad(*operands, out_dtype=torch.float32, out_1NK=main.main_grad[None])
                grad_w_NK = main_grad.added(main)
            else:
                grad_w_NK = settings.product.wgrad(*operands, out_dtype=ctx.w_dtype)[0]
        if needs_bias:
            grad_bias_N = grad_SN.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        if needs_x and received is not None:
            grad_x = received()
        return grad_x, grad_w_NK, grad_bias_N, None

"""Grouped GEMM on quantized numbers, differentiable: `quantized_grouped_gemm`. Recipes: "fp8", "fp8_block", "mxfp8".

Each tensor is quantized once, in both of its orientations: x and the weight in forward, the result's gradient in
backward. Backward keeps the transposed copies of x and the weight, in float8, and no bf16 x. All three products sum in
fp32.

An implementation is an object with the functions of `low_precision_reference.py` and a `bias_grad`. One that does not
serve all operands says so with `refusal(x's dtype, N, K, dtype, grad_dtype)`. On chips without block-scaled matrix
instructions mxfp8 is emulated: bf16 numbers that mxfp8 has too, multiplied by the bf16 grouped GEMM.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from maniple.kernels import chips, main_grad, registry
from maniple.kernels.forgotten import forget, hold, is_forgotten
from maniple.kernels.grouped_gemm import low_precision_reference
from maniple.kernels.grouped_gemm.low_precision_ops import OP, Operand, operators_for, split
from maniple.kernels.grouped_gemm.operands import check_operands
from maniple.kernels.quantize import (
    QuantizedWeight,
    emulate_rows,
    emulate_weight,
    quantize_rows,
    quantize_weight,
)
from maniple.kernels.quantize.formats import RECIPES
from maniple.kernels.quantize.passed import Passed
from maniple.kernels.quantize.quantized import FNUZ


def _no_float8() -> str | None:
    return chips.not_on("sm_90", "sm_100", "gfx942", "gfx950", what="a GPU that multiplies float8")


def _no_block_scales() -> str | None:
    return chips.not_on("sm_100", "gfx950", what="block-scaled matrix instructions")


def _wrong_encoding(result: torch.dtype, n: int, k: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> str | None:
    fnuz = chips.chip() == "gfx942"
    if all((kind in FNUZ) == fnuz for kind in (dtype, grad_dtype)):
        return None
    return f"multiplies {'FNUZ' if fnuz else 'OCP'} float8 on {chips.chip()}, not {dtype} and {grad_dtype}"


_triton = registry.LazyModule("maniple.kernels.grouped_gemm.low_precision_triton")
_hopper = registry.LazyModule("maniple.kernels.grouped_gemm.hopper_fp8")
_emulated = registry.LazyModule("maniple.kernels.grouped_gemm.low_precision_emulated")
registry.register(OP, "reference", RECIPES, registry.ANY_DEVICE, low_precision_reference)
registry.register(OP, "emulated", {"mxfp8"}, registry.ANY_DEVICE, _emulated, preference=1)
registry.register(
    OP,
    "triton",
    {"fp8", "fp8_block"},
    {"cuda"},
    _triton,
    preference=2,
    reason_unavailable=_no_float8,
    refuses=_wrong_encoding,
)
registry.register(
    OP,
    "triton_scaled",
    {"mxfp8"},
    {"cuda"},
    _triton,
    preference=2,
    reason_unavailable=_no_block_scales,
    refuses=_wrong_encoding,
)
registry.register(
    OP,
    "hopper",
    {"fp8", "fp8_block"},
    {"cuda"},
    _hopper,
    preference=3,
    reason_unavailable=chips.no_hopper,
    refuses=lambda *operands: _hopper.refusal(*operands),
)


def quantized_grouped_gemm(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    recipe: str,
    layout: Literal["nk", "kn"] = "nk",
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
    source_S: torch.Tensor | None = None,
    slots_TK: torch.Tensor | None = None,
    zero_tail: bool = False,
    fuse_wgrad_accumulation: bool = False,
    weight_cache: QuantizedWeight | None = None,
    dtype: torch.dtype = torch.float8_e4m3fn,
    grad_dtype: torch.dtype | None = None,
    rounding: Literal["rceil", "floor"] = "rceil",
    kernels: str | None = None,
    splits: list[int] | None = None,
    passed_x: Passed | None = None,
    passed_grad: Passed | None = None,
) -> torch.Tensor:
    """The bf16 `grouped_gemm` with its three products in float8; `[S, N]` in x's dtype.

    Operands, groups, tails, bias, `source_S` with `slots_TK`, `fuse_wgrad_accumulation` and `splits` are
    `grouped_gemm`'s; gathered rows are quantized as they are read. recipe: "fp8",
    "fp8_block" or "mxfp8". dtype: of x and the weight; grad_dtype: of the result's gradient (None: the same), for
    example float8_e5m2. rounding: of mxfp8's scales. weight_cache: keeps the quantized weight between optimizer steps
    (of `w_G` as it lies in memory, settings as here); emulated mxfp8 does not use it. kernels: an implementation's
    name, or None or "auto" for the best that serves these operands. passed_x: x is a stand-in, quantized before (to
    this recipe and dtype, not emulated); passed_grad: so will the result's gradient be, which a bias cannot use.

    Raises UserError if no implementation serves the recipe here, ValueError for operands that do not agree.
    """
    check_operands(x_SK, w_G, ends_G, source_S, slots_TK, layout, bias_GN, bias_scale_S)
    if fuse_wgrad_accumulation and getattr(w_G, "main_grad", None) is None:
        raise ValueError("fuse_wgrad_accumulation needs a weight with a main_grad")
    grad_dtype = dtype if grad_dtype is None else grad_dtype
    operands = x_SK.dtype, w_G.shape[1 if layout == "nk" else 2], x_SK.shape[1], dtype, grad_dtype
    name = _choose(recipe, x_SK.device.type, kernels, operands)
    quantizer = Quantizer(recipe, layout, rounding, weight_cache, emulate=name == "emulated")
    passed = passed_x, passed_grad
    settings = _Settings(quantizer, name, zero_tail, fuse_wgrad_accumulation, dtype, grad_dtype, splits, *passed)
    if source_S is not None:
        source_S = source_S.to(torch.int32).contiguous()
    return _QuantizedGroupedGemm.apply(x_SK, w_G, ends_G, bias_GN, bias_scale_S, source_S, slots_TK, settings)


@torch.compiler.assume_constant_result
def _choose(recipe: str, device_type: str, kernels: str | None, operands: tuple[Any, ...]) -> str:
    """The implementation's name. A compiled graph keeps it, since it depends on no value."""
    return registry.select(OP, recipe, device_type, kernels, operands).name


@dataclass(frozen=True)
class Quantizer:
    """Makes the operands of the products. Where it emulates they are bf16, of the shapes of the quantized ones."""

    recipe: str
    layout: str
    rounding: Any
    cache: QuantizedWeight | None
    emulate: bool

    def rows(
        self,
        x_SK: torch.Tensor,
        ends_G: torch.Tensor,
        dtype: torch.dtype,
        rowwise: bool,
        columnwise: bool,
        source_S: torch.Tensor | None = None,
    ) -> tuple[Operand | None, Operand | None, torch.Tensor]:
        """(`[S, K]`, its transpose as weight gradients take it, where the transpose's groups end)."""
        asked: dict[str, Any] = dict(dtype=dtype, rounding=self.rounding, rowwise=rowwise, columnwise=columnwise)
        asked["source_S"] = source_S
        if self.emulate:
            along_SK, down_SK = emulate_rows(x_SK, ends_G, **asked)
            return along_SK, None if down_SK is None else down_SK.t(), ends_G
        made = quantize_rows(x_SK, ends_G, self.recipe, **asked)
        return made.rowwise, made.columnwise, made.padded_ends_G

    def weight(self, w_G: torch.Tensor, dtype: torch.dtype, both: bool) -> tuple[Operand, Operand | None]:
        """(`[G, N, K]` of forward, `[G, K, N]` of dgrad)."""
        if self.emulate:
            w_G = emulate_weight(w_G, dtype=dtype, rounding=self.rounding)
            pair: tuple[Operand, Operand | None] = w_G, w_G.transpose(1, 2)
        elif self.cache is not None:
            kept = self.cache(w_G)
            pair = kept.forward, kept.dgrad
        else:
            turned = both or self.layout == "kn"
            made = quantize_weight(w_G, self.recipe, dtype=dtype, rounding=self.rounding, dgrad=turned)
            pair = made.forward, made.dgrad
        if pair[1] is None and (both or self.layout == "kn"):
            raise ValueError("this weight is needed in both orientations: take a weight_cache with dgrad=True")
        return pair if self.layout == "nk" else (pair[1], pair[0])


@dataclass(frozen=True)
class _Settings:
    quantizer: Quantizer
    kernels: str
    zero_tail: bool
    fuse: bool
    dtype: torch.dtype
    grad_dtype: torch.dtype
    splits: list[int] | None
    passed_x: Passed | None
    passed_grad: Passed | None


def _parts(passed: Passed) -> tuple[Operand | None, Operand | None, torch.Tensor]:
    rows = passed.take()
    return rows.rowwise, rows.columnwise, rows.padded_ends_G


class _QuantizedGroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, w_G, ends_G, bias_GN, bias_scale_S, source_S, slots_TK, settings):
        quantizer = settings.quantizer
        needs_x, needs_w = ctx.needs_input_grad[:2]
        if settings.passed_grad is not None:
            settings.passed_grad.rowwise, settings.passed_grad.columnwise = needs_x, needs_w
        if settings.passed_x is not None:
            x, x_turned, turned_ends_G = _parts(settings.passed_x)
        else:
            x, x_turned, turned_ends_G = quantizer.rows(x_SK, ends_G, settings.dtype, True, needs_w, source_S)
        if x_turned is not None and is_forgotten(x_SK):
            rows = hold(x_SK)

            def turned_again() -> list[torch.Tensor]:
                made = split(quantizer.rows(rows(), ends_G, settings.dtype, False, True, source_S)[1])
                return [part for part in made if part is not None]

            forget([part for part in split(x_turned) if part is not None], turned_again)
        w, w_turned = quantizer.weight(w_G, settings.dtype, needs_x)
        operators = operators_for(x_SK)
        # emulated weights are made anew in backward: kept they would cost a copy of the weight in bf16
        kept_w = (w_G, None) if quantizer.emulate else split(w_turned if needs_x else None)
        main = w_G if settings.fuse else None
        ctx.settings, ctx.main, ctx.x_dtype, ctx.w_dtype = settings, main, x_SK.dtype, w_G.dtype
        slots_TK = slots_TK if source_S is not None and needs_x else None
        ctx.save_for_backward(ends_G, turned_ends_G, bias_GN, bias_scale_S, slots_TK, *split(x_turned), *kept_w)
        return operators.rows(
            *split(x),
            *split(w),
            ends_G,
            bias_GN,
            bias_scale_S,
            x_SK.dtype,
            settings.zero_tail,
            settings.splits,
            quantizer.recipe,
            settings.kernels,
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SN):
        ends_G, turned_ends_G, bias_GN, bias_scale_S, slots_TK, x, x_scales, w, w_scales = ctx.saved_tensors
        settings, quantizer = ctx.settings, ctx.settings.quantizer
        recipe, kernels, operators = quantizer.recipe, settings.kernels, operators_for(grad_SN)
        needs_x, needs_w, _, needs_bias, needs_scale = ctx.needs_input_grad[:5]
        grad_x_SK = grad_w_G = grad_bias_GN = grad_scale_S = grad = grad_turned = None
        if settings.passed_grad is not None:
            grad, grad_turned, _ = _parts(settings.passed_grad)
        elif needs_x or needs_w:
            grad, grad_turned, _ = quantizer.rows(grad_SN, ends_G, settings.grad_dtype, needs_x, needs_w)
        if needs_x:
            if quantizer.emulate:
                w, w_scales = split(quantizer.weight(w, settings.dtype, True)[1])
            ends = (ends_G, None, None, ctx.x_dtype, settings.zero_tail, settings.splits)
            grad_x_SK = operators.rows(*split(grad), w, w_scales, *ends, recipe, kernels)
            if slots_TK is not None:
                grad_x_SK = operators.gather_sum(grad_x_SK, slots_TK, ends_G, "bf16", None)
        if needs_w:
            operands = *split(grad_turned), x, x_scales, turned_ends_G, quantizer.layout
            if settings.fuse:
                operators.wgrad_into(*operands, ctx.main.main_grad, main_grad.adds(ctx.main), recipe, kernels)
                grad_w_G = main_grad.added(ctx.main)
            else:
                grad_w_G = operators.wgrad(*operands, ctx.w_dtype, recipe, kernels)
        if needs_bias or needs_scale:
            made = operators.bias_grad(grad_SN, ends_G, bias_GN, bias_scale_S, settings.splits, recipe, kernels)
            grad_bias_GN, grad_scale_S = made[0], None if bias_scale_S is None else made[1]
        return grad_x_SK, grad_w_G, None, grad_bias_GN, grad_scale_S, None, None, None

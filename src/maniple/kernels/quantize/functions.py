"""The public functions of quantization: they check operands, find the implementation and name what comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch

from maniple.kernels import chips, custom_ops, registry
from maniple.kernels.quantize import ops, reference
from maniple.kernels.quantize.formats import RECIPES, ROUNDINGS
from maniple.kernels.quantize.quantized import FNUZ, OCP, Quantized, Rows, Weight

registry.register("quantize", "reference", RECIPES, registry.ANY_DEVICE, reference)
registry.register(
    "quantize",
    "triton",
    RECIPES,
    {"cuda"},
    registry.LazyModule("maniple.kernels.quantize.triton"),
    preference=1,
    reason_unavailable=chips.no_triton,
)
_hopper = registry.LazyModule("maniple.kernels.quantize.hopper")
registry.register(
    "quantize",
    "hopper",
    {name for name, recipe in RECIPES.items() if recipe.rows},
    {"cuda"},
    _hopper,
    preference=2,
    reason_unavailable=chips.no_hopper,
    refuses=lambda *operands: _hopper.refusal(*operands),
)

Rounding = Literal["rceil", "floor"]


def quantize_rows(
    x_SK: torch.Tensor,
    ends_G: torch.Tensor | None,
    recipe: str,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: Rounding = "rceil",
    rowwise: bool = True,
    columnwise: bool = True,
    source_S: torch.Tensor | None = None,
    kernels: str | None = None,
) -> Rows:
    """Expert-sorted rows, quantized along K (`rowwise`) and, transposed, along the rows of each group (`columnwise`).

    x_SK: `[S, K]` bf16 or fp32, any strides; rows at or past `ends_G[-1]` are never read. ends_G: int32 `[G]`,
    inclusive prefix ends; None: one dense matrix, all of whose rows count. recipe: "fp8" (one scale for all rows),
    "fp8_block" (1 x 128) or "mxfp8" (1 x 32, E8M0, OCP formats only). rounding: of block scales to powers of two,
    "rceil" or "floor" (OCP's); `reference.py` defines both. source_S: int32 `[S]`; then row s of the result is
    `x[source_S[s]]`, zeros where that is none of T, and x is `[T, K]`. kernels: an implementation's name, or None for
    the best. What comes back and where: see `Rows`.

    Raises ValueError for operands that do not fit, UserError if no implementation serves the recipe.
    """
    ends_G = _check_rows(x_SK, ends_G, source_S, recipe, dtype, rounding)
    block = (1, RECIPES[recipe].rows) if RECIPES[recipe].rows else (0, 0)
    data_SK, scales_S, data_KP, scales_K, padded_G = _call(ops.quantize_rows, x_SK)(
        x_SK.detach(), ends_G, source_S, recipe, dtype, rounding, rowwise, columnwise, kernels
    )
    return Rows(
        Quantized(data_SK, scales_S, block) if rowwise else None,
        Quantized(data_KP, scales_K, block) if columnwise else None,
        padded_G,
    )


def quantize_weight(
    w_GNK: torch.Tensor,
    recipe: str,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: Rounding = "rceil",
    dgrad: bool = True,
    kernels: str | None = None,
) -> Weight:
    """Weights, quantized once for forward, `[G, N, K]`, and (with `dgrad`) dgrad, `[G, K, N]`: the same values.

    w_GNK: `[G, N, K]` bf16 or fp32, any strides. Scales: one a matrix ("fp8"), 128 x 128 ("fp8_block") or 32 x 32
    ("mxfp8"). The other arguments and errors: see `quantize_rows`.
    """
    _check(w_GNK, 3, "w [G, N, K]", recipe, dtype, rounding)
    side = RECIPES[recipe].weight
    data_GNK, data_GKN, scales_G = _call(ops.quantize_weight, w_GNK)(
        w_GNK.detach(), recipe, dtype, rounding, dgrad, kernels
    )
    turned = Quantized(data_GKN, scales_G.transpose(1, 2), (side, side)) if dgrad else None
    return Weight(Quantized(data_GNK, scales_G, (side, side)), turned)


def emulate_rows(
    x_SK: torch.Tensor,
    ends_G: torch.Tensor | None,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: Rounding = "rceil",
    rowwise: bool = True,
    columnwise: bool = True,
    source_S: torch.Tensor | None = None,
    kernels: str | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """x rounded to what mxfp8 keeps of it: (blocks along K, blocks along the rows of each group), `[S, K]`, x's dtype.

    For chips without block-scaled matrix instructions: products of these in bf16 are mxfp8's. A float8 number times a
    power of two is exact in bf16, and bf16 x stays so at the smallest exponents too, since x has no smaller digits
    there. Neither is transposed. Rows past `ends_G[-1]` are unwritten. Arguments and errors: see `quantize_rows`.
    """
    ends_G = _check_rows(x_SK, ends_G, source_S, "mxfp8", dtype, rounding)
    along_SK, down_SK = _call(ops.emulate_rows, x_SK)(
        x_SK.detach(), ends_G, source_S, dtype, rounding, rowwise, columnwise, kernels
    )
    return along_SK if rowwise else None, down_SK if columnwise else None


def emulate_weight(
    w_GNK: torch.Tensor,
    *,
    dtype: torch.dtype = torch.float8_e4m3fn,
    rounding: Rounding = "rceil",
    kernels: str | None = None,
) -> torch.Tensor:
    """w rounded to what mxfp8 keeps of it in squares of 32, `[G, N, K]` in w's dtype: for forward and dgrad alike."""
    _check(w_GNK, 3, "w [G, N, K]", "mxfp8", dtype, rounding)
    return _call(ops.emulate_weight, w_GNK)(w_GNK.detach(), dtype, rounding, kernels)


def dequantize(q: Quantized, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """`data * scales` of q's shape, multiplied in fp32 (fp64 for fp64) and rounded to `dtype`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return reference.multiplied(q.data.to(wide), q.scales, q.block).to(dtype)


def _call(function: Callable[..., Any], tensor: torch.Tensor) -> Callable[..., Any]:
    """The function itself, or its operator where someone looks at operators."""
    return getattr(torch.ops.maniple, function.__name__) if custom_ops.named(tensor) else function


def _check_rows(
    x: torch.Tensor,
    ends_G: torch.Tensor | None,
    source_S: torch.Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    rounding: str,
) -> torch.Tensor:
    """The group ends to use. Raises ValueError for operands that do not fit."""
    _check(x, 2, "x [S, K]", recipe, dtype, rounding)
    if source_S is not None and (source_S.dim() != 1 or source_S.dtype != torch.int32 or not source_S.is_contiguous()):
        raise ValueError(f"source needs contiguous int32 [S], not {source_S.dtype} {list(source_S.shape)}")
    slots = x.shape[0] if source_S is None else source_S.shape[0]
    if ends_G is None:
        return torch.full((1,), slots, dtype=torch.int32, device=x.device)
    if ends_G.dim() != 1 or not ends_G.shape[0] or ends_G.dtype != torch.int32 or not ends_G.is_contiguous():
        raise ValueError(f"ends needs contiguous int32 [G], not {ends_G.dtype} {list(ends_G.shape)}")
    return ends_G


def _check(x: torch.Tensor, dims: int, what: str, recipe: str, dtype: torch.dtype, rounding: str) -> None:
    if x.dim() != dims or x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"quantization needs {what} in bf16 or fp32, not {x.dtype} {list(x.shape)}")
    if recipe not in RECIPES:
        raise ValueError(f"quantization has the recipes {', '.join(RECIPES)}, not {recipe!r}")
    if dtype not in OCP + FNUZ:
        raise ValueError(f"quantization yields float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz, not {dtype}")
    if dtype in FNUZ and RECIPES[recipe].e8m0:
        raise ValueError(f"{recipe} is defined for the OCP formats, not {dtype}: take float8_e4m3fn, or fp8_block")
    if rounding not in ROUNDINGS:
        raise ValueError(f"scales round by {' or '.join(ROUNDINGS)}, not {rounding!r}")

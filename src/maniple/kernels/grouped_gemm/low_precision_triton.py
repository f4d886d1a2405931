"""The low-precision grouped GEMM in portable Triton: float8 products on NVIDIA and AMD GPUs, any shape.

As in `triton.py`, a fixed number of programs walks over all tiles of all groups and reads on the device where they are.
A tensor scale is multiplied in at the end; fp32 block scales are multiplied to each 128-deep part of the sum; E8M0
scales go into the matrix instruction, on chips that have such. Sums are fp32. The functions have the interface of
`low_precision_reference.py`. Tensor and fp32 block scales have run under Triton's interpreter and on an H200; E8M0
scales are compiled for the GPUs that have the instructions, and have not yet run on one.
"""

from __future__ import annotations

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from maniple.kernels.grouped_gemm import launch
from maniple.kernels.grouped_gemm import triton as portable
from maniple.kernels.grouped_gemm.low_precision_kernels import rows_kernel, wgrad_kernel
from maniple.kernels.quantize import Quantized, require_one_encoding

bias_grad = portable.bias_grad
_FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3"}


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
    """As the reference's. `splits` is not needed: sizes are read on the device."""
    require_one_encoding(x, w)
    slots, k = x.data.shape
    groups, n, _ = w.data.shape
    out_SN = torch.empty(slots, n, dtype=out_dtype, device=x.data.device)
    if not out_SN.numel():
        return out_SN
    recipe = recipe_of(x)
    target = portable.target_of(x.data)
    tile = launch.low_precision_tile(target, recipe)
    x_desc, w_desc = _descriptors(target, (x.data, [tile.rows, tile.depth]), (w.data, [1, tile.columns, tile.depth]))
    rows_kernel[(portable.programs(x.data),)](
        x.data,
        x.scales,
        w.data,
        w.scales,
        out_SN,
        ends_G,
        None if bias_GN is None else bias_GN.contiguous(),
        None if bias_scale_S is None else bias_scale_S.contiguous(),
        x_desc,
        w_desc,
        n,
        k,
        *x.scales.stride(),
        *w.scales.stride(),
        out_SN.stride(0),
        GROUPS=groups,
        RECIPE=recipe,
        X_FORMAT=_FORMATS[x.data.dtype],
        W_FORMAT=_FORMATS[w.data.dtype],
        DESCRIPTORS=x_desc is not None,
        BIAS=bias_GN is not None,
        SCALE=bias_scale_S is not None,
        **_constants(tile),
    )
    if zero_tail:
        portable.fill_tail(out_SN, ends_G)
    return out_SN


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
    """As the reference's; `out` may have any strides."""
    require_one_encoding(grad, x)
    a, b = (grad, x) if layout == "nk" else (x, grad)
    out = weight_gradient(a, b, len(padded_ends_G), out_dtype, out, accumulate)
    if not out.numel():
        return out
    recipe = recipe_of(x)
    target = portable.target_of(x.data)
    tile = launch.low_precision_tile(target, recipe, wgrad=True)
    a_desc, b_desc = _descriptors(target, (a.data, [tile.rows, tile.depth]), (b.data, [tile.columns, tile.depth]))
    wgrad_kernel[(portable.programs(x.data),)](
        a.data,
        a.scales,
        b.data,
        b.scales,
        out,
        padded_ends_G,
        a_desc,
        b_desc,
        a.data.shape[0],
        b.data.shape[0],
        a.data.shape[1],
        *a.scales.stride(),
        *b.scales.stride(),
        *out.stride(),
        GROUPS=len(padded_ends_G),
        RECIPE=recipe,
        A_FORMAT=_FORMATS[a.data.dtype],
        B_FORMAT=_FORMATS[b.data.dtype],
        DESCRIPTORS=a_desc is not None,
        ACCUMULATE=accumulate,
        **_constants(tile),
    )
    return out


def recipe_of(operand: Quantized) -> str:
    """The recipe that an operand was quantized by, read off its scales."""
    if operand.e8m0:
        return "mxfp8"
    return "fp8_block" if operand.block[0] else "fp8"


def weight_gradient(
    a: Quantized, b: Quantized, groups: int, out_dtype: torch.dtype, out: torch.Tensor | None, accumulate: bool
) -> torch.Tensor:
    """`out`, or a new tensor for the weight gradients. Raises ValueError where it does not fit."""
    if accumulate and out is None:
        raise ValueError("wgrad accumulates into out: pass it")
    shape = (groups, a.data.shape[0], b.data.shape[0])
    if out is None:
        return torch.empty(shape, dtype=out_dtype, device=a.data.device)
    if out.shape != shape:
        raise ValueError(f"wgrad needs out of shape {list(shape)}, not {list(out.shape)}")
    return out


def _descriptors(target: str, *operands: tuple[torch.Tensor, list[int]]) -> list[TensorDescriptor | None]:
    """Descriptors of the operands, each with its block, where the target has them and all operands allow them."""
    if target == "amd" or any(portable.no_descriptor("", data) is not None for data, _ in operands):
        return [None] * len(operands)
    return [TensorDescriptor.from_tensor(data, block) for data, block in operands]


def _constants(tile: launch.Tile) -> dict[str, int]:
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "BAND": tile.band,
        "num_stages": tile.stages,
        "num_warps": tile.warps,
    }

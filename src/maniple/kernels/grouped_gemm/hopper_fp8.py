"""Grouped GEMM for Hopper in Gluon: float8, warp-specialised, with a scale for each 128 of the contraction.

The roles are `hopper.py`'s: one warp loads, two warpgroups compute and store. A stage also brings the scales of its
part of the contraction. Those of x and of the weight come in copies of four bytes: groups start at any row, and the
copy engine takes no vector that starts between multiples of 16 bytes (it stops the kernel with an illegal instruction).
In a weight gradient both operands' scales lie at such multiples, and the engine brings them. The tensor cores keep some
14 bits of a float8 sum: each part, 128 deep, is multiplied by its scales and added up in fp32, while the other
warpgroup's product runs. Tensor scales are multiplied in at the end.

Rows past a group's end are loaded as they lie and not stored; past K the copy engine fills in zeros; groups of a weight
gradient are padded with zeros. The functions have the interface of `low_precision_reference.py`; what this file cannot
run, `refusal` says.
"""

from __future__ import annotations

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from maniple.kernels.grouped_gemm import hopper, launch
from maniple.kernels.grouped_gemm import low_precision_triton as low_precision
from maniple.kernels.grouped_gemm import triton as portable
from maniple.kernels.grouped_gemm.hopper_fp8_kernels import rows_kernel
from maniple.kernels.grouped_gemm.hopper_fp8_wgrad_kernels import wgrad_kernel
from maniple.kernels.quantize import Quantized
from maniple.kernels.quantize.quantized import OCP

bias_grad = portable.bias_grad
_LOADER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # of 504 that one warp of each role may share


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
    """As the reference's, to bf16. Raises ValueError for operands that `refusal` names."""
    slots, k = x.data.shape
    groups, n, _ = w.data.shape
    if out_dtype != torch.bfloat16:
        raise ValueError(f"Hopper's float8 grouped GEMM writes bf16, not {out_dtype}")
    out_SN = torch.empty(slots, n, dtype=out_dtype, device=x.data.device)
    if not out_SN.numel():
        return out_SN
    _check({"x": x.data, "w": w.data, "the result": out_SN})
    block = low_precision.recipe_of(x) == "fp8_block"
    tile = launch.hopper_fp8_tile(n, block=block, bias=bias_GN is not None)
    rows_kernel[(portable.programs(x.data),)](
        hopper.descriptor(x.data, [tile.rows // 2, 128]),
        hopper.descriptor(w.data, [1, tile.columns, 128]),
        hopper.descriptor(out_SN, [tile.rows // 2, 128]),
        out_SN,
        ends_G,
        x.scales,
        w.scales,
        None if bias_GN is None else bias_GN.contiguous(),
        None if bias_scale_S is None else bias_scale_S.contiguous(),
        n,
        k,
        slots,
        *w.scales.stride(),
        out_SN.stride(0),
        GROUPS=groups,
        BLOCK=block,
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
    """As the reference's. A result that `hopper.writes` cannot serve is the portable kernel's."""
    if out_dtype != torch.bfloat16 if out is None else not hopper.writes(out, accumulate):
        return low_precision.wgrad(
            grad, x, padded_ends_G, layout=layout, out_dtype=out_dtype, out=out, accumulate=accumulate
        )
    a, b = (grad, x) if layout == "nk" else (x, grad)
    out = low_precision.weight_gradient(a, b, len(padded_ends_G), out_dtype, out, accumulate)
    if not a.data.numel() or not b.data.numel():  # no rows at all, or nothing to compute
        return out if accumulate else out.zero_()
    _check({"x": x.data, "the result's gradient": grad.data})
    tile = launch.hopper_fp8_wgrad_tile(b.data.shape[0])
    wgrad_kernel[(portable.programs(x.data),)](
        hopper.descriptor(a.data, [tile.rows // 2, 128]),
        hopper.descriptor(b.data, [tile.columns, 128]),
        _scale_descriptor(a, tile.rows // 2),
        _scale_descriptor(b, tile.columns),
        hopper.descriptor(out, [1, tile.rows // 2, 64 if out.dtype == torch.float32 else 128]),
        padded_ends_G,
        a.scales,
        b.scales,
        a.data.shape[0],
        b.data.shape[0],
        GROUPS=len(padded_ends_G),
        BLOCK=low_precision.recipe_of(x) == "fp8_block",
        ACCUMULATE=accumulate,
        **_constants(tile),
    )
    return out


def refusal(result: torch.dtype, n: int, k: int, dtype: torch.dtype, grad_dtype: torch.dtype) -> str | None:
    """Why forward and both gradients cannot run here, for results of a dtype and numbers of two; None if they can."""
    if result != torch.bfloat16:
        return f"computes bf16 results, not {str(result).removeprefix('torch.')}"
    if dtype not in OCP or grad_dtype not in OCP:
        return f"multiplies OCP float8, not {dtype} and {grad_dtype}"
    if k % launch.ALIGNMENT or n % launch.ALIGNMENT:
        return f"needs K and N multiples of {launch.ALIGNMENT}, and they are {k} and {n}"
    return None


def _check(operands: dict[str, torch.Tensor]) -> None:
    for name, tensor in operands.items():
        if tensor.dtype not in (*OCP, torch.bfloat16):
            raise ValueError(f"{name} is {tensor.dtype}, and Hopper multiplies OCP float8")
        if (reason := portable.no_descriptor(name, tensor)) is not None:
            raise ValueError(reason)


def _scale_descriptor(operand: Quantized, rows: int) -> TensorDescriptor:
    """Of the scales as one vector, block after block; of the smallest vector there is where there are no blocks."""
    if operand.block[0]:
        flat = operand.scales.t().reshape(-1)  # a view, of scales as `quantize_rows` lays them
    else:
        flat = operand.scales.new_empty(rows)
    if flat.numel() >= 2**31:
        raise ValueError(f"Hopper's float8 grouped GEMM counts scales in 31 bits, and here are {flat.numel()}")
    return hopper.descriptor(flat, [rows])


def _constants(tile: launch.Tile) -> dict[str, int]:
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "STAGES": tile.stages,
        "BUFFERS": tile.buffers,
        "BAND": tile.band,
        "LOADER": _LOADER_REGISTERS,
        "CONSUMER": _CONSUMER_REGISTERS,
        "num_warps": tile.warps,
    }

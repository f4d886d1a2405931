"""Rows in blocks quantized on Hopper, in Gluon: a tile of 128 x 128 stays in registers, 16 rows of 8 columns a thread.

So what goes down the columns is 16 bytes of a thread, and only float8 passes through shared memory, once. Every program
searches for the rows of its tile by itself: no kernel has to run before.

`rows` has the interface of `reference.py`; what this file cannot run, `refusal` says.
"""

from __future__ import annotations

import torch

from maniple.kernels.quantize import launch
from maniple.kernels.quantize.hopper_kernels import rows_kernel
from maniple.kernels.quantize.quantized import OCP, padded_size
from maniple.kernels.quantize.reference import empty_rows, format_of


def rows(
    x_SK: torch.Tensor,
    ends_G: torch.Tensor,
    source_S: torch.Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    rounding: str,
    rowwise: bool,
    columnwise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference's, for operands that `refusal` does not name."""
    (slots, k), groups = x_SK.shape, ends_G.shape[0]
    padded = padded_size(slots, groups)
    data_SK, scales_S, data_KP, scales_K = empty_rows(x_SK, slots, padded, recipe, dtype, rowwise, columnwise)
    padded_G = torch.empty_like(ends_G)
    rows_kernel[(launch.rows_grid(padded, k),)](
        x_SK.view(torch.int32),
        ends_G,
        padded_G,
        data_SK.view(torch.int16) if rowwise else None,
        scales_S if rowwise else None,
        data_KP.view(torch.int32) if columnwise else None,
        scales_K if columnwise else None,
        k,
        slots,
        padded,
        x_SK.stride(0) // 2,
        **launch.hopper_constants(groups),
        **launch.hopper_format(recipe, format_of(dtype).name, rounding),
    )
    return data_SK, scales_S, data_KP, scales_K, padded_G


def refusal(what: str, x: torch.Tensor, source_S: torch.Tensor | None, recipe: str, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot serve the operands; None if they can. what: "rows", "weight" or "emulation"."""
    if what != "rows":
        return "quantizes rows alone"
    if source_S is not None:
        return "gathers no rows"
    if x.dtype != torch.bfloat16 or dtype not in OCP:
        return f"quantizes bf16 to OCP's float8, not {x.dtype} to {dtype}"
    if not x.numel() or x.shape[1] % 16 or x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        needs = "rows of a multiple of 16 numbers that start at multiples of 16 bytes"
        return f"needs {needs}, not {list(x.shape)} of strides {x.stride()}"
    return None

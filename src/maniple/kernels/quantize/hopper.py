"""Rows in blocks quantized on Hopper, in Gluon: a tile of 128 x 128 stays in registers, 16 rows of 8 columns a thread.

So what goes down the columns is 16 bytes of a thread, and only float8 passes through shared memory, once. Every program
searches for the rows of its tile by itself: no kernel has to run before. mxfp8's scales, a byte for 32 numbers, are put
in their places by a second kernel, which may start while the first runs out.

`rows` has the interface of `reference.py`; what this file cannot run, `refusal` says.
"""

from __future__ import annotations

import torch

from maniple.kernels.quantize import launch
from maniple.kernels.quantize.formats import RECIPES
from maniple.kernels.quantize.hopper_kernels import rows_kernel, scales_kernel
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
    e8m0 = RECIPES[recipe].e8m0
    along, down = scales_S, scales_K
    if e8m0:  # four scales of a tile to a word
        along = ends_G.new_empty(k // launch.COLUMNS * padded if rowwise else 0)
        down = ends_G.new_empty(padded // launch.ROWS * k if columnwise else 0)
    rows_kernel[(launch.rows_grid(padded, k),)](
        x_SK.view(torch.int32),
        ends_G,
        padded_G,
        data_SK.view(torch.int16) if rowwise else None,
        (along.view(torch.uint8) if e8m0 else along) if rowwise else None,
        data_KP.view(torch.int32) if columnwise else None,
        (down.view(torch.uint8) if e8m0 else down) if columnwise else None,
        k,
        slots,
        padded,
        x_SK.stride(0) // 2,
        **launch.hopper_constants(groups),
        **launch.hopper_format(recipe, format_of(dtype).name, rounding),
    )
    if e8m0 and (rowwise or columnwise):
        programs, tiles = launch.scales_grid(padded, k, rowwise, columnwise)
        scales_kernel[(programs,)](
            ends_G,
            padded_G,
            along if rowwise else None,
            scales_S.view(torch.int32) if rowwise else None,
            down if columnwise else None,
            scales_K.view(torch.int32) if columnwise else None,
            k,
            padded,
            **tiles,
            **launch.hopper_constants(groups),
            launch_pdl=True,
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
    multiple = launch.COLUMNS if RECIPES[recipe].e8m0 else 16
    if not x.numel() or x.shape[1] % multiple or x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        needs = f"rows of a multiple of {multiple} numbers that start at multiples of 16 bytes"
        return f"needs {needs}, not {list(x.shape)} of strides {x.stride()}"
    return None

"""Quantization in Triton: one read of bf16 or fp32 numbers, both orientations out, NVIDIA and AMD GPUs.

A program takes a 128 x 128 tile that lies in one group, so that blocks along the rows need no other program, and a
group's transposed rows start at a multiple of 128. Group ends are read on the device: the host waits for nothing.
`fp8` alone reads its input twice: its one scale has to be known first. Where the chip has no cast to the format, the
kernels round with integers, to the same bits. The functions have the interface of `reference.py`.
"""

from __future__ import annotations

import functools

import torch

from maniple.kernels.quantize import launch
from maniple.kernels.quantize.formats import RECIPES
from maniple.kernels.quantize.quantized import padded_size
from maniple.kernels.quantize.reference import empty_rows, empty_weight, format_of
from maniple.kernels.quantize.triton_kernels import amax_kernel, rows_kernel, tiles_kernel
from maniple.kernels.quantize.weight_kernels import weight_kernel


def rows(
    x_TK: torch.Tensor,
    ends_G: torch.Tensor,
    source_S: torch.Tensor | None,
    recipe: str,
    dtype: torch.dtype,
    rounding: str,
    rowwise: bool,
    columnwise: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference's."""
    slots = (x_TK if source_S is None else source_S).shape[0]
    padded = padded_size(slots, ends_G.shape[0])
    data_SK, scales_S, data_KP, scales_K = empty_rows(x_TK, slots, padded, recipe, dtype, rowwise, columnwise)
    amax = None
    if not RECIPES[recipe].rows:
        amax = _amax(x_TK[None], source_S, ends_G[-1:], slots)
    padded_G = _rows(
        x_TK,
        ends_G,
        source_S,
        (data_SK.view(torch.uint8), scales_S) if rowwise else None,
        (data_KP.view(torch.int32), scales_K) if columnwise else None,  # a multiple of 128 bytes a row
        amax,
        launch.constants(target_of(x_TK), recipe, format_of(dtype).name, rounding, weight=False, emulate=False),
    )
    return data_SK, scales_S, data_KP, scales_K, padded_G


def weight(
    w_GNK: torch.Tensor, recipe: str, dtype: torch.dtype, rounding: str, dgrad: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference's."""
    (g, n, k), whole = w_GNK.shape, not RECIPES[recipe].weight
    data_GNK, data_GKN, scales_G = empty_weight(w_GNK, recipe, dtype, dgrad)
    if data_GNK.numel():
        weight_kernel[(launch.weight_grid(g, n, k),)](
            w_GNK,
            _amax(w_GNK) if whole else None,
            data_GNK.view(torch.uint8),
            data_GKN.view(torch.uint8 if n % 4 else torch.int32) if dgrad else None,
            scales_G,
            n,
            k,
            *w_GNK.stride(),
            **launch.constants(target_of(w_GNK), recipe, format_of(dtype).name, rounding, weight=True, emulate=False),
        )
    return data_GNK, data_GKN, scales_G


def emulated_rows(
    x_TK: torch.Tensor,
    ends_G: torch.Tensor,
    source_S: torch.Tensor | None,
    dtype: torch.dtype,
    rounding: str,
    rowwise: bool,
    columnwise: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's."""
    slots, k = (x_TK if source_S is None else source_S).shape[0], x_TK.shape[1]
    along_SK = x_TK.new_empty(slots if rowwise else 0, k)
    down_SK = x_TK.new_empty(slots if columnwise else 0, k)
    _rows(
        x_TK,
        ends_G,
        source_S,
        (along_SK, along_SK) if rowwise else None,
        (down_SK, down_SK) if columnwise else None,
        None,
        launch.constants(target_of(x_TK), "mxfp8", format_of(dtype).name, rounding, weight=False, emulate=True),
    )
    return along_SK, down_SK


def emulated_weight(w_GNK: torch.Tensor, dtype: torch.dtype, rounding: str) -> torch.Tensor:
    """As the reference's."""
    out_GNK = torch.empty_like(w_GNK, memory_format=torch.contiguous_format)
    if out_GNK.numel():
        weight_kernel[(launch.weight_grid(*w_GNK.shape),)](
            w_GNK,
            None,
            out_GNK,
            None,
            None,
            *w_GNK.shape[1:],
            *w_GNK.stride(),
            **launch.constants(target_of(w_GNK), "mxfp8", format_of(dtype).name, rounding, weight=True, emulate=True),
        )
    return out_GNK


def _rows(
    x_TK: torch.Tensor,
    ends_G: torch.Tensor,
    source_S: torch.Tensor | None,
    along: tuple[torch.Tensor, torch.Tensor] | None,
    down: tuple[torch.Tensor, torch.Tensor] | None,
    amax: torch.Tensor | None,
    constants: dict,
) -> torch.Tensor:
    """Fills (data, scales) along K and down the rows, each unless None; the padded ends, int32 `[G]`."""
    k, groups = x_TK.shape[1], ends_G.shape[0]
    padded = padded_size((x_TK if source_S is None else source_S).shape[0], groups)
    tiles = max(padded // launch.ROWS, 1)
    padded_G, tops, ends = (ends_G.new_empty(size) for size in (groups, tiles, tiles))
    tiles_kernel[(launch.tiles_grid(padded),)](
        ends_G,
        padded_G,
        tops,
        ends,
        tiles,
        GROUPS=groups,
        WIDTH=launch.group_width(groups),
        ROWS=launch.ROWS,
        TILES=launch.TILES,
        num_warps=4,
    )
    rows_kernel[(launch.rows_grid(padded, k),)](
        x_TK,
        source_S,
        tops,
        ends,
        amax,
        None if along is None else along[0],
        None if along is None else along[1],
        None if down is None else down[0],
        None if down is None else down[1],
        k,
        padded,
        x_TK.shape[0],
        *x_TK.stride(),
        *((0, 0) if along is None else along[1].stride()),
        *((0, 0) if down is None else down[1].stride()),
        **constants,
    )
    return padded_G


def _amax(
    x_MRC: torch.Tensor,
    source_S: torch.Tensor | None = None,
    end: torch.Tensor | None = None,
    rows: int | None = None,
) -> torch.Tensor:
    """Bits of the largest magnitude of each matrix, int32 `[M]`; of the rows before `end`, where it is given."""
    matrices, r, c = x_MRC.shape
    rows = r if rows is None else rows
    amax_M = torch.zeros(matrices, dtype=torch.int32, device=x_MRC.device)
    if matrices and rows and c:
        amax_kernel[(launch.amax_grid(matrices, rows, c),)](
            x_MRC,
            source_S,
            end,
            amax_M,
            rows,
            c,
            r,
            *x_MRC.stride(),
            ROWS=launch.AMAX_ROWS,
            COLUMNS=launch.AMAX_COLUMNS,
            num_warps=launch.warps(target_of(x_MRC)),
        )
    return amax_M


def target_of(tensor: torch.Tensor) -> str:
    """What `launch` calls the device of a tensor; Triton's interpreter runs on the CPU."""
    return "interpreter" if tensor.device.type == "cpu" else _target(tensor.device.index)


@functools.cache
def _target(index: int) -> str:
    properties = torch.cuda.get_device_properties(index)
    return properties.gcnArchName.split(":")[0] if torch.version.hip else f"sm_{properties.major}{properties.minor}"

"""Tiles of the grouped GEMM kernels and what their bulk loads ask of a tensor. No torch here: JAX launches them too.

Sizes: S rows, G groups; a rows kernel computes `[S, N]` from K; a weight-gradient kernel computes `[A, B]` a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 16  # bytes: of a tensor's address and of every stride but the last, for loads through a descriptor


@dataclass(frozen=True)
class Tile:
    """One program's part of a result, and how it is computed.

    rows x columns of the result; depth: of the contraction, a step; stages: steps that are loaded ahead; band: rows of
    tiles that programs walk down before they turn to the next columns, so that they share what the L2 cache holds.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    band: int


def rows_tile(target: str, itemsize: int, columns: int) -> Tile:
    """Tile of `[S, N]` = rows times weights on a "hopper", "nvidia", "amd" or "interpreter" target.

    Measured for "hopper" only (bf16, one H200); the others are first choices that fit registers and shared memory.
    """
    if target == "interpreter":
        return Tile(16, 32, 16, 1, 1, 2)
    if itemsize > 2:  # fp32 goes without tensor cores, and its tiles take twice the memory
        return Tile(64, 64, 32, 2, 4, 8)
    if target == "hopper":
        return Tile(128, 256, 64, 3, 4, 16) if columns > 128 else Tile(128, 128, 64, 5, 4, 16)
    if target == "nvidia":
        return Tile(128, 256, 64, 3, 8, 8)
    return Tile(128, 128, 64, 2, 8, 8)


def wgrad_tile(target: str, itemsize: int, columns: int, *, accumulates: bool = False) -> Tile:
    """Tile of a group's `[A, B]`; its depth counts rows. `accumulates`: into fp32, whose staging takes more room."""
    tile = rows_tile(target, itemsize, columns)
    if target == "hopper" and itemsize == 2:
        return Tile(tile.rows, tile.columns, tile.depth, tile.stages + 1 if accumulates else tile.stages, 4, 4)
    return tile


def no_descriptor(name: str, shape: Sequence[int], strides: Sequence[int], itemsize: int, address: int) -> str | None:
    """Why a tensor cannot be loaded through a descriptor (the bulk copy engine), or None if it can."""
    if not all(shape):
        return f"{name} is empty"
    if strides[-1] != 1:
        return f"{name} needs its last dimension contiguous"
    if address % ALIGNMENT or any(stride * itemsize % ALIGNMENT for stride in strides[:-1]):
        return f"{name} needs rows that start at multiples of {ALIGNMENT} bytes ({ALIGNMENT // itemsize} elements)"
    return None

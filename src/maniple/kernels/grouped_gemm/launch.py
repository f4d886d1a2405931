"""Tiles of the grouped GEMM kernels and what their bulk loads ask of a tensor. No torch here: JAX launches them too.

Sizes: S rows, G groups; a rows kernel computes `[S, N]` from K; a weight-gradient kernel computes `[A, B]` a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from maniple.kernels.swiglu.launch import Block

ALIGNMENT = 16  # bytes: of a tensor's address and of every stride but the last, for loads through a descriptor


@dataclass(frozen=True)
class Tile:
    """One program's part of a result, and how it is computed.

    rows x columns of the result; depth: of the contraction, a step; stages: steps that are loaded ahead; band: rows of
    tiles that programs walk down before they turn to the next columns, so that they share what the L2 cache holds;
    buffers: parts of the result that a warpgroup of Hopper's kernels has room to write while it goes on; parts: in how
    many it writes the rows of a bf16 result, so that what is saved holds another stage; pace: steps after which
    Hopper's loaders wait for each other, 0 for never.
    """

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int
    band: int
    buffers: int = 1
    parts: int = 1
    pace: int = 0


# Hopper's kernels in bf16: two warpgroups, 64 rows each.
HOPPER_TILES = (Tile(128, 128, 64, 5, 4, 16), Tile(128, 256, 64, 3, 4, 4), Tile(128, 256, 64, 4, 4, 16, parts=2))


PACED_WEIGHT = 2**23  # elements of a group's weight, a third of the L2 cache in bf16, from which loaders keep pace


def hopper_tile(columns: int, depth: int, layout: str) -> Tile:
    """Tile of `[S, N]`, of N columns from K = depth, for Hopper's bf16 kernel. Measured on one H200."""
    if columns <= 128:
        return HOPPER_TILES[0]
    tile = HOPPER_TILES[2 if layout == "nk" and depth > 4096 else 1]
    return replace(tile, pace=16) if columns * depth >= PACED_WEIGHT else tile


def rows_tile(target: str, itemsize: int, columns: int) -> Tile:
    """Tile of `[S, N]` = rows times weights on a "hopper", "nvidia", "amd" or "interpreter" target.

    Measured for "hopper" only (bf16, one H200); the others are first choices that fit registers and shared memory.
    """
    if target == "interpreter":
        return Tile(16, 32, 16, 1, 1, 2)
    if itemsize > 2:  # fp32 goes without tensor cores, and its tiles take twice the memory
        return Tile(64, 64, 32, 2, 4, 8)
    if target == "hopper":
        return HOPPER_TILES[columns > 128]
    if target == "nvidia":
        return Tile(128, 256, 64, 3, 8, 8)
    return Tile(128, 128, 64, 2, 8, 8)


def wgrad_tile(target: str, itemsize: int, columns: int, *, fp32: bool = False) -> Tile:
    """Tile of a group's `[A, B]`; its depth counts rows. fp32: the result is, and is staged in other parts."""
    tile = rows_tile(target, itemsize, columns)
    if target == "hopper" and itemsize == 2:
        # where there are few columns to turn to, programs walk further down first
        return replace(tile, stages=min(tile.stages, 4), band=8 if columns <= 1024 else 4, buffers=2 if fp32 else 1)
    return tile


def swiglu_tile(target: str, itemsize: int, columns: int, *, interleaved: bool = False) -> Tile:
    """Tile of `[S, F]` where gate and up are two products of the same rows: half as many columns as `rows_tile`.

    On NVIDIA a quarter where they are interleaved: to weave them takes as many registers again.
    """
    tile = rows_tile(target, itemsize, 2 * columns)
    return replace(tile, columns=tile.columns // (4 if interleaved and target == "nvidia" and itemsize == 2 else 2))


def hopper_swiglu_tile(columns: int) -> Tile:
    """Tile of `[S, F]`, of F columns, for Hopper's bf16 kernel with SwiGLU. Measured on one H200, at large weights."""
    return replace(swiglu_tile("hopper", 2, columns), stages=4, band=8, pace=16)


FUSED_SWIGLU_DEPTH = 4096  # K from which Hopper's product with SwiGLU is faster than one after the other; one H200


def gather_block(target: str) -> Block:
    """Tokens and columns of one program that sums gathered rows. Measured on one H200; on AMD a first choice."""
    if target == "interpreter":
        return Block(4, 16, 1)
    return Block(4, 512, 4) if target == "amd" else Block(1, 1024, 4)


def no_descriptor(name: str, shape: Sequence[int], strides: Sequence[int], itemsize: int, address: int) -> str | None:
    """Why a tensor cannot be loaded through a descriptor (the bulk copy engine), or None if it can."""
    if not all(shape):
        return f"{name} is empty"
    if strides[-1] != 1:
        return f"{name} needs its last dimension contiguous"
    if address % ALIGNMENT or any(stride * itemsize % ALIGNMENT for stride in strides[:-1]):
        return f"{name} needs rows that start at multiples of {ALIGNMENT} bytes ({ALIGNMENT // itemsize} elements)"
    return None


def low_precision_tile(target: str, recipe: str, *, wgrad: bool = False) -> Tile:
    """Tile of the portable float8 kernels; targets as `rows_tile`'s. Chosen to compile without spills; not yet timed.

    "fp8_block" needs a depth of 128 and columns that divide 128, "mxfp8" a depth that 32 divides.
    """
    if target == "interpreter":
        return Tile(32, 64, 128, 1, 1, 2)
    if wgrad and recipe == "fp8_block":  # two vectors of scales, beside the part of the sum that they are for
        return Tile(128, 64, 128, 2 if target == "amd" else 4, 8, 8)
    if target == "amd":
        return Tile(128, 128, 128, 2, 8, 8)
    if recipe == "mxfp8":
        return Tile(128, 128, 128, 3, 8, 8) if wgrad else Tile(128, 256, 128, 3, 8, 8)
    return Tile(128, 128, 128, 4, 8, 8)


# Hopper's float8 kernels: two warpgroups, 64 rows each. A tile of 256 columns reads a quarter less from the L2 cache
# for its work than one of 128; its sums fill the registers, so that a bias finds room in the narrow one only.
# Room to write both halves of a result is worth more than a fourth stage where scales are added up block by block.
_FP8_NARROW = Tile(128, 128, 128, 5, 4, 8)
_FP8_BLOCK = Tile(128, 256, 128, 3, 4, 8, buffers=2)
_FP8_TENSOR = Tile(128, 256, 128, 4, 4, 4)
HOPPER_FP8_TILES = (_FP8_NARROW, _FP8_BLOCK, _FP8_TENSOR)
HOPPER_FP8_WGRAD_TILES = (Tile(128, 128, 128, 4, 4, 16, buffers=2), Tile(128, 256, 128, 3, 4, 16, buffers=2))


def hopper_fp8_tile(columns: int, *, block: bool, bias: bool) -> Tile:
    """Tile of `[S, N]`, of N columns, for Hopper's float8 kernel with or without block scales. Measured on one H200."""
    if bias or columns <= 128:
        return _FP8_NARROW
    return _FP8_BLOCK if block else _FP8_TENSOR


def hopper_fp8_wgrad_tile(columns: int) -> Tile:
    """Tile of a group's `[A, B]`, of B columns; its depth counts rows. Measured likewise."""
    return HOPPER_FP8_WGRAD_TILES[columns > 128]

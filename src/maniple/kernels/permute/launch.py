"""Blocks of the permutation kernels. No torch here, so that another framework can launch them. Not yet timed."""

from __future__ import annotations

from dataclasses import dataclass

from maniple.kernels.swiglu.launch import Block

INDEX_WARPS = 4  # of a program of the three sorting kernels that place single numbers


@dataclass(frozen=True)
class SortBlock:
    """Sorting. chunk: choices whose ranks one program finds; columns: how many it compares them with at once;

    chunks x experts: tallies that one program sums at once.
    """

    chunk: int
    columns: int
    chunks: int
    experts: int


def sort_block(target: str, experts: int) -> SortBlock:
    """For E = `experts` on an "interpreter", "nvidia" or "amd" target.

    Every chunk keeps a number an expert, and compares each of its choices with all of its choices: with many experts
    longer chunks, so that the tallies stay small beside the rows.
    """
    if target == "interpreter":
        return SortBlock(8, 4, 4, 2)
    return SortBlock(256, 32, 128, 16) if experts <= 512 else SortBlock(512, 16, 128, 16)


def width(experts: int) -> int:
    """Lanes that hold a number an expert, and one for the choices of none: a power of two."""
    return 1 << experts.bit_length()


def rows_block(target: str, columns: int) -> Block:
    """Rows and columns of one program that copies or sums rows of D = `columns`: as many numbers for any D."""
    if target == "interpreter":
        return Block(4, 16, 1)
    numbers, widest = (1024, 1024) if target == "nvidia" else (2048, 512)
    wide = min(widest, 1 << max(columns - 1, 0).bit_length())
    return Block(numbers // wide, wide, 4)

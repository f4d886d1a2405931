"""Blocks of the SwiGLU kernels. No torch here: JAX launches them too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """rows of one program, columns of one step of its walk along F, warps."""

    rows: int
    columns: int
    warps: int


def block(target: str, columns: int) -> Block:
    """For F = `columns` on an "interpreter", "nvidia" or "amd" target. Measured on one H200; on AMD a first choice.

    8 elements a thread at once; on AMD the masks of more do not fit its scalar registers.
    """
    if target == "interpreter":
        return Block(4, 16, 1)
    if target == "nvidia":
        return Block(1, 1024, 4) if columns > 1024 else Block(4, 256, 4)
    return Block(4, 512, 4) if columns > 256 else Block(8, 256, 4)

"""Blocks of the page kernels. No torch here, so that another framework can launch them. Not yet timed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CopyBlock:
    """words: how many one program copies; numbers: of pages that one program looks at at once."""

    words: int
    numbers: int
    warps: int


def copy_block(target: str) -> CopyBlock:
    """For an "interpreter", "nvidia" or "amd" target."""
    if target == "interpreter":
        return CopyBlock(16, 4, 1)
    return CopyBlock(2048, 1024, 4) if target == "nvidia" else CopyBlock(4096, 1024, 4)

"""Blocks of the cross-entropy kernels. No torch here: JAX launches them too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """columns of one step along the vocabulary, warps."""

    columns: int
    warps: int


def block(target: str) -> Block:
    """On an "interpreter", "nvidia" or "amd" target. First choices: not measured."""
    return Block(32, 1) if target == "interpreter" else Block(2048, 8)

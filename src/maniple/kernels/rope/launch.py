"""Blocks of the rotary kernel. No torch here: JAX launches it too."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """heads of one program, pairs of a head (a power of two), warps."""

    heads: int
    pairs: int
    warps: int


def block(target: str, heads: int, pairs: int) -> Block:
    """For `heads` heads of `pairs` pairs on an "interpreter", "nvidia" or "amd" target. First choices: not measured.

    A program turns about 2,048 pairs of one token, so that a thread has 16 of them.
    """
    width = _power_of_two(pairs)
    if target == "interpreter":
        return Block(2, width, 1)
    return Block(min(_power_of_two(heads), max(1, 2048 // width)), width, 4)


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()

"""Blocks and numbers of the AdamW kernel. No torch here: JAX launches it too."""

from __future__ import annotations

from dataclasses import dataclass

_WORD = 2**32 - 1
# A bijection of 32-bit words whose every input bit flips every output bit about half of the time (the constants are
# C. Wellons's, 2018, in the public domain).
SHIFTS, FACTORS = (16, 15, 16), (0x7FEB352D, 0x846CA68B)
SECOND = 0x9E3779B9  # 2^32 over the golden ratio: sets one use of a word apart from another


@dataclass(frozen=True)
class Block:
    """elements of one program, warps."""

    elements: int
    warps: int


def block(target: str) -> Block:
    """On an "interpreter", "nvidia" or "amd" target. First choices, not measured: 8 elements a thread, so that a bf16
    tensor is read 16 bytes at a time."""
    if target == "interpreter":
        return Block(32, 1)
    return Block(1024, 4) if target == "nvidia" else Block(2048, 4)


@dataclass(frozen=True)
class Scalars:
    """What one update multiplies with."""

    beta1: float
    rest1: float  # 1 - beta1
    beta2: float
    rest2: float
    decay: float  # 1 - learning rate x weight decay
    step_size: float  # learning rate / (1 - beta1^step)
    root: float  # 1 / sqrt(1 - beta2^step)
    epsilon: float


def scalars(
    learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float, step: int
) -> Scalars:
    """Of update number `step`, from 1 (Loshchilov and Hutter, 2019, algorithm 2)."""
    return Scalars(
        beta1=beta1,
        rest1=1 - beta1,
        beta2=beta2,
        rest2=1 - beta2,
        decay=1 - learning_rate * weight_decay,
        step_size=learning_rate / (1 - beta1**step),
        root=(1 - beta2**step) ** -0.5,
        epsilon=epsilon,
    )


def mixed(word: int) -> int:
    """The 32-bit word's image, as the kernel computes it."""
    word &= _WORD
    word = (word ^ (word >> SHIFTS[0])) * FACTORS[0] & _WORD
    word = (word ^ (word >> SHIFTS[1])) * FACTORS[1] & _WORD
    return word ^ (word >> SHIFTS[2])


def key(seed: int, step: int) -> int:
    """What sets the rounding of one tensor in one update apart: a signed 32-bit integer."""
    word = mixed(mixed(seed) ^ mixed(step + SECOND))
    return word - 2**32 if word >= 2**31 else word

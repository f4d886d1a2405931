"""Permutations that need no array: any position of a shuffle of 10^12 things, computed by itself.

A generalized Feistel network after Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002): numbers below
a x b are written as two digits, of base a and b, and each of a few rounds adds to one digit a hash of the other, which
can be undone whatever the hash. With a and b near the root of the size, hardly a number lies past the size; those are
sent through again. Integer arithmetic throughout, so the same on every machine and for every version of NumPy.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np

_ROUNDS = 8


class Permutation:
    """A bijection of 0 to `size` - 1 drawn by `key` (any text). Calling it maps an array or a number."""

    def __init__(self, size: int, key: str) -> None:
        if not 0 < size < 1 << 62:
            raise ValueError(f"a permutation of {size} things")
        self.size = size
        self._high = math.isqrt(size - 1) + 1
        self._low = -(-size // self._high)
        digest = hashlib.blake2b(key.encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, index: np.ndarray | int) -> np.ndarray:
        """int64, in the shape of `index`, whose values must be in range."""
        numbers = np.array(index, dtype=np.uint64, ndmin=1)
        out = self._once(numbers)
        while (outside := np.flatnonzero(out >= self.size)).size:
            out[outside] = self._once(out[outside])
        return out.astype(np.int64).reshape(np.shape(index))

    def _once(self, numbers: np.ndarray) -> np.ndarray:
        a, b = np.uint64(self._high), np.uint64(self._low)
        high, low = np.divmod(numbers, b)
        for first, second in self._keys.reshape(-1, 2):
            high = (high + _mixed(low, first) % a) % a
            low = (low + _mixed(high, second) % b) % b
        return high * b + low


def _mixed(numbers: np.ndarray, key: np.uint64) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014) over `numbers` + `key`; wraps at 2^64."""
    out = numbers + key
    out = (out ^ (out >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    out = (out ^ (out >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return out ^ (out >> np.uint64(31))

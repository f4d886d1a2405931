"""Recipes and number formats of quantization, as plain numbers. No torch here: JAX quantizes by the same.

A format has a sign, an exponent and `mantissa` bits; its numbers below `2^smallest` are subnormal.
"""

from __future__ import annotations

from dataclasses import dataclass

ROUNDINGS = ("rceil", "floor")
SMALLEST_SCALE = 2.0**-126  # of fp32 scales: below it GPUs may flush to zero. E8M0's own is 2^-127, byte 0.
GROUP_ALIGNMENT = 128  # columns: where each group starts in transposed rows


@dataclass(frozen=True)
class Format:
    """One float8 format, and whether its bytes are OCP's (else gfx942's FNUZ, which has no negative zero)."""

    name: str  # torch's, after "float8_"
    mantissa: int
    smallest: int  # exponent of the smallest normal number
    largest: float
    ocp: bool

    @property
    def top(self) -> int:
        """Exponent of the largest number: its mantissa is `largest / 2^top`."""
        return {448.0: 8, 57344.0: 15, 240.0: 7}[self.largest]

    @property
    def bias(self) -> int:
        return 1 - self.smallest

    @property
    def extra(self) -> int:
        """Mantissa bits of an fp32 amax above which `rceil` takes the next power of two: those of `largest`."""
        return int((self.largest / 2.0**self.top - 1) * 2**23)

    @property
    def largest_byte(self) -> int:
        """The E8M0 byte above which `largest` times the scale would be no finite fp32."""
        return 254 - self.top

    @property
    def nan(self) -> int:
        """The byte that stands for NaN."""
        return 0x7F if self.ocp else 0x80


FORMATS = {
    f.name: f
    for f in (
        Format("e4m3fn", 3, -6, 448.0, True),
        Format("e5m2", 2, -14, 57344.0, True),
        Format("e4m3fnuz", 3, -7, 240.0, False),
    )
}


@dataclass(frozen=True)
class Recipe:
    """How values share scales: `rows` of them along a row (0: all), weights in squares of `weight` (0: a matrix)."""

    rows: int
    weight: int
    e8m0: bool


RECIPES = {
    "fp8": Recipe(0, 0, False),
    "fp8_block": Recipe(128, 128, False),
    "mxfp8": Recipe(32, 32, True),
}

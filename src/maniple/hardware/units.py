"""Sizes and times in words."""

from __future__ import annotations


def binary_size(size: float) -> str:
    """Bytes as `2.50 GiB`, `12.3 MiB` or `4.0 KiB`: the largest unit of which there is a whole one."""
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    if size >= 2**20:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 2**10:,.1f} KiB"


def three_digits(value: float, sign: str = "") -> str:
    """A number to three digits, `0.0123`, `12.0`; a large one whole, `7,890`. sign: "+" shows it."""
    return f"{value:{sign},.0f}" if abs(value) >= 99.95 else f"{value:{sign}#.3g}"

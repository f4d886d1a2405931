"""Sizes in words."""

from __future__ import annotations


def binary_size(size: float) -> str:
    """Bytes as `2.50 GiB`, `12.3 MiB` or `4.0 KiB`: the largest unit of which there is a whole one."""
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    if size >= 2**20:
        return f"{size / 2**20:,.1f} MiB"
    return f"{size / 2**10:,.1f} KiB"

"""Rows that are quantized by whoever makes them, on their way to the product that multiplies them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from maniple.kernels.quantize.quantized import Quantized, Rows


class How(NamedTuple):
    """How rows are quantized and in which orientations: arguments of `reference.rows`, in their order."""

    recipe: str
    dtype: torch.dtype
    rounding: str
    rowwise: bool
    columnwise: bool


@dataclass
class Passed:
    """What passes beside a stand-in, which autograd takes for the rows: an activation, or the gradient of a result.

    rowwise, columnwise: what the product needs. Each pass of autograd puts new rows here, and takes them.
    """

    rowwise: bool
    columnwise: bool
    rows: Rows | None = None

    def put(self, parts: tuple[torch.Tensor, ...], block: int) -> None:
        """parts: as `reference.rows` of this package returns them."""
        data_SK, scales_S, data_KP, scales_K, padded_G = parts
        self.rows = Rows(
            Quantized(data_SK, scales_S, (1, block)) if self.rowwise else None,
            Quantized(data_KP, scales_K, (1, block)) if self.columnwise else None,
            padded_G,
        )

    def take(self) -> Rows:
        rows, self.rows = self.rows, None
        if rows is None:
            raise RuntimeError("nothing was passed: what quantizes these rows has not run before their product")
        return rows


def stand_in(like: torch.Tensor, columns: int) -> torch.Tensor:
    """Undefined `[S, columns]` of like's rows and dtype, in the memory of one number."""
    return like.new_empty(1).expand(like.shape[0], columns)

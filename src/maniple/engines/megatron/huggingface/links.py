"""How a checkpoint's tensors and Hugging Face's correspond: rearrangements that lose nothing, read in either direction.

A checkpoint's tensor is stored in chunks: an expert is one, so that no more than an expert of a stacked weight is in
memory at once; other tensors are one chunk each. A chunk is filled by links, each from one Hugging Face tensor, or from
one row of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Window = tuple[slice | int, ...]


@dataclass(frozen=True)
class Link:
    """A Hugging Face tensor, or its row `row`, and the part of a chunk that it is.

    shape: of the whole Hugging Face tensor. view: the chunk's shape as it is to be seen; window: the part of that.
    split: the shape in which the Hugging Face tensor (its row) is to be seen; order: its axes in the window's order.
    """

    name: str
    shape: tuple[int, ...]
    row: int | None
    view: tuple[int, ...]
    window: Window
    split: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def numbers(self) -> int:
        return math.prod(self.split)

    def put(self, theirs: torch.Tensor, chunk: torch.Tensor) -> None:
        """Writes a Hugging Face tensor (its row) into its place in the chunk."""
        chunk.view(self.view)[self.window].copy_(theirs.reshape(self.split).permute(self.order))

    def take(self, chunk: torch.Tensor) -> torch.Tensor:
        """The Hugging Face tensor (its row) out of the chunk: what `put` has put there."""
        back = [self.order.index(axis) for axis in range(len(self.order))]
        shape = self.shape if self.row is None else self.shape[1:]
        return chunk.reshape(self.view)[self.window].permute(back).reshape(shape).contiguous()


@dataclass(frozen=True)
class Chunk:
    """A part of a checkpoint's tensor `key`, whose whole shape is `shape`, from `offset` on."""

    key: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    size: tuple[int, ...]
    links: tuple[Link, ...]
    fp32: bool = False  # whatever the model's dtype

    @property
    def numbers(self) -> int:
        return math.prod(self.size)


def whole(key: str, shape: tuple[int, ...], *links: Link, fp32: bool = False) -> Chunk:
    """A tensor in one chunk."""
    return Chunk(key, shape, (0,) * len(shape), shape, links, fp32)


def same(name: str, shape: tuple[int, ...]) -> Link:
    """The chunk itself."""
    return Link(name, shape, None, shape, (), shape, tuple(range(len(shape))))


def stacked(names: tuple[str, ...], shape: tuple[int, ...]) -> Iterator[Link]:
    """Tensors of that shape, one behind another along the chunk's first axis."""
    order = tuple(range(len(shape)))
    for number, name in enumerate(names):
        yield Link(name, shape, None, (len(names), *shape), (number,), shape, order)

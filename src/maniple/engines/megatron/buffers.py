"""Static buffers of a model on this rank: what they were asked for in a pass, and what follows where it was too much.

The sizes that a pass would have needed stand on the device (`moe/room.py`, `moe/pages.py`). They join the one reading
of a step's figures; all ranks see the same, leave the update out together, enlarge what was too small and run the step
again with the same micro-batches and random numbers (`step.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.random import _get_all_rng_states, _set_all_rng_states

from maniple.engines.megatron.model import routers
from maniple.engines.megatron.moe import moe_layers
from maniple.moe.pages import ActivationPages
from maniple.moe.room import Room


@dataclass(frozen=True)
class Overflow:
    """A buffer that was too small for a step. layer: from 0, MTP depth d is num_layers + d; None: the pages."""

    layer: int | None
    asked: int  # rows from one rank to another, or pages of the rank that wanted most
    had: int

    def __str__(self) -> str:
        if self.layer is None:
            return f"kept activations: {self.asked} pages wanted, {self.had} there"
        return f"layer {self.layer}: {self.asked} rows from one rank to another, room for {self.had}"


class Buffers:
    """The bounded buffers of this rank's layers; false where the job has none."""

    def __init__(self, chunks: list[torch.nn.Module]) -> None:
        config = chunks[0].config
        # of the job, since a rank without a bounded layer is to enter the collective as well
        moe = getattr(config, "maniple_moe", None)
        self._bounded = moe is not None and moe.buffer_factor is not None
        layers = [layer for layer in moe_layers(chunks) if layer.room is not None] if self._bounded else []
        numbers = {id(router): number for number, router in routers(chunks).items()} if layers else {}
        self.rooms: dict[int, Room] = {
            numbers[id(layer.router)]: layer.room for layer in layers if layer.room is not None
        }
        self.pages: ActivationPages | None = layers[0].pages if layers else None
        self.layers = config.num_layers + (config.mtp_num_layers or 0)

    def __bool__(self) -> bool:
        return self._bounded

    def reset(self) -> None:
        for buffer in (*self.rooms.values(), self.pages):
            if buffer is not None:
                buffer.reset()

    @torch.no_grad()
    def figures(self, device: torch.device) -> torch.Tensor:
        """What was asked of each buffer and what there was, fp64, on the device. Collective over the world."""
        table = torch.zeros(2, self.layers + 1, dtype=torch.float64, device=device)
        for number, room in self.rooms.items():
            if room.asked is not None:
                table[0, number] = room.asked[0]
            table[1, number].fill_(room.rows)
        own = torch.zeros(1, dtype=torch.float64, device=device)
        if self.pages is not None and self.pages.most is not None:
            own += self.pages.most
            # ranks have as many pages as their layers need: only those that lack some have a word in it
            lacks = own[0] > self.pages.pages
            table[0, -1] = torch.where(lacks, own[0], 0)
            table[1, -1] = torch.where(lacks, self.pages.pages, 0)
        dist.all_reduce(table, op=dist.ReduceOp.MAX)
        return torch.cat([table.flatten(), own])

    def grow(self, figures: list[float]) -> tuple[Overflow, ...]:
        """Enlarges what was too small; figures: `figures`' values. The same answer on every rank."""
        *rows, own = (int(figure) for figure in figures)
        asked, had = rows[: self.layers + 1], rows[self.layers + 1 :]
        found = [
            Overflow(number, asked[number], had[number]) for number in range(self.layers) if asked[number] > had[number]
        ]
        for number, room in self.rooms.items():
            if asked[number] > had[number]:
                room.grow(asked[number])
        if asked[-1]:
            found.append(Overflow(None, asked[-1], had[-1]))
            if self.pages is not None and own > self.pages.pages:
                self.pages.grow(own)
        return tuple(found)


class Replay:
    """A step's micro-batches and random states, to run it again from."""

    def __init__(self, batches: list[Iterator]) -> None:
        self._sources = [_Again(source) for source in batches]
        self.batches: list[Iterator] = list(self._sources)
        self._states: Any = _get_all_rng_states()

    def rewind(self) -> None:
        for source in self._sources:
            source.position = 0
        _set_all_rng_states(*self._states)


class _Again:
    """An iterator that keeps what it gave, and gives it again from `position`."""

    def __init__(self, source: Iterator) -> None:
        self.source, self.position = source, 0
        self.kept: list[Any] = []

    def __iter__(self) -> Iterator:
        return self

    def __next__(self) -> Any:
        if self.position == len(self.kept):
            self.kept.append(next(self.source))
        self.position += 1
        return self.kept[self.position - 1]

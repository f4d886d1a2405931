"""What the forward pass of one micro-batch leaves in memory for its backward pass, and what is there at the fullest
moment of a step, by layer and module.

A tensor counts for the module that made it. It is kept if it is still there when the forward pass of its model chunk is
over, whoever keeps it: saved for a gradient, held by a recipe of recomputation, or an index of the exchange. What no
module's forward made, gradients above all, counts for the pass in which it was made.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from maniple.engines.megatron.dry_run.memory import StorageMeter
from maniple.engines.megatron.model import unwrap
from maniple.engines.megatron.recompute import Layer, spans
from maniple.hardware.units import binary_size
from maniple.metrics import pulse

_DEEPEST = 2  # names of a module's path in its layer


@dataclass(frozen=True)
class Kept:
    """Bytes that one module's tensors take. layer: its number from 0, MTP depth d is `num_layers + d`; None: outside.
    operations: the bytes by what made them."""

    layer: int | None
    module: str
    bytes: int
    operations: dict[str, int]


Owner = tuple[int | None, str]  # number of the layer, and module


class OwnedMeter(StorageMeter):
    """A `StorageMeter` that also knows who made what, of the storages since `begin`.

    Since `begin_step`: `peaks`, the most at one time by what the rank was doing (`metrics.pulse`), and of the fullest
    moment of all its `phase`, and `holds`: bytes by owner, all that was made since and is there.
    """

    def __init__(self, rounding: int = 512) -> None:
        super().__init__(rounding)
        self.owners: list[Owner] = []  # of the module that runs, the innermost last
        self.peaks: dict[str, int] = {}
        self.phase, self.holds = "", Counter[Owner]()
        self._operation = ""
        self._made: dict[int, tuple[Owner, str, int]] = {}
        self._there: dict[int, tuple[Owner, int]] = {}
        self._by_owner: Counter[Owner] = Counter()

    def begin(self) -> None:
        self._made.clear()

    def begin_step(self) -> None:
        """What is there now counts as nobody's."""
        self.reset_peak()
        self.peaks, self.phase, self.holds = {}, "", Counter()
        self._there.clear()
        self._by_owner.clear()

    def kept(self) -> list[Kept]:
        """What is there of it, modules in the order in which they made something."""
        found: dict[tuple[int | None, str], dict[str, int]] = {}
        for owner, operation, size in self._made.values():
            operations = found.setdefault(owner, defaultdict(int))
            operations[operation] += size
        return [Kept(*owner, sum(by.values()), dict(by)) for owner, by in found.items()]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self._operation = func.name().split("::", 1)[-1].split(".")[0]
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _see(self, storage: torch.UntypedStorage) -> None:
        before, most = self.live, self.peak
        super()._see(storage)
        size = self.live - before
        if not size:
            return
        phase = pulse.place().phase
        owner = self.owners[-1] if self.owners else (None, f"made in {phase}")
        if self.owners:
            self._made[storage._cdata] = owner, self._operation, size
        self._there[storage._cdata] = owner, size
        self._by_owner[owner] += size
        self.peaks[phase] = max(self.peaks.get(phase, 0), self.live)
        if self.live > most:
            self.phase, self.holds = phase, self._by_owner.copy()

    def _forget(self, key: int, size: int, reference: Any) -> None:
        super()._forget(key, size, reference)
        self._made.pop(key, None)
        owner, size = self._there.pop(key, (None, 0))
        if owner is not None:
            self._by_owner[owner] -= size


@contextlib.contextmanager
def watched(chunks: list, meter: OwnedMeter) -> Iterator[list[Kept]]:
    """A list that the first forward pass of each chunk fills. It stays empty where a schedule runs pieces of layers."""
    kept: list[Kept] = []
    handles: list[Any] = []
    for chunk in map(unwrap, chunks):
        for module, owner in _owners(chunk):
            handles.append(module.register_forward_pre_hook(partial(_enter, meter, owner)))
            handles.append(module.register_forward_hook(partial(_leave, meter), always_call=True))
        handles.append(chunk.register_forward_pre_hook(partial(_begin, meter)))
        handles.append(chunk.register_forward_hook(partial(_end, meter, kept, set())))
    try:
        yield kept
    finally:
        for handle in handles:
            handle.remove()


def _owners(chunk: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, tuple[int | None, str]]]:
    layers = {f"{name}.": module for name, module in chunk.named_modules() if isinstance(module, Layer)}
    for name, module in chunk.named_modules():
        prefix = next((prefix for prefix in layers if f"{name}.".startswith(prefix)), "")
        number = layers[prefix].number if prefix else None
        path = f"{name}."[len(prefix) :].split(".")[:-1]
        if name:
            yield module, (number, ".".join(path[:_DEEPEST]) or "layer")


def _enter(meter: OwnedMeter, owner: tuple[int | None, str], *_: Any) -> None:
    meter.owners.append(owner)


def _leave(meter: OwnedMeter, *_: Any) -> None:
    meter.owners.pop()


def _begin(meter: OwnedMeter, *_: Any) -> None:
    meter.begin()
    meter.owners.append((None, "model"))


def _end(meter: OwnedMeter, kept: list[Kept], done: set[int], chunk: torch.nn.Module, *_: Any) -> None:
    meter.owners.pop()
    if not done:
        done.add(id(chunk))
        kept.extend(meter.kept())


def table(kept: list[Kept], tokens: int) -> Any:
    """Of rich's: layers that keep alike are one. tokens: of the micro-batch on this rank."""
    from rich.table import Table

    of_layer: dict[int | None, list[tuple[str, int]]] = defaultdict(list)
    for part in kept:
        of_layer[part.layer].append((part.module, part.bytes))
    alike: dict[tuple[tuple[str, int], ...], list[int | None]] = defaultdict(list)
    for number, parts in of_layer.items():
        alike[tuple(sorted(parts, key=lambda part: -part[1]))].append(number)
    made = Table(title=f"kept for the backward pass, of one micro-batch of {tokens:,} tokens on this rank")
    made.add_column("layers")
    made.add_column("module")
    made.add_column("a layer", justify="right")
    made.add_column("bytes a token", justify="right")
    for same, numbers in alike.items():
        known = [number for number in numbers if number is not None]
        name = spans(known) if known else "outside"
        for module, size in [("all", sum(size for _, size in same)), *same]:
            made.add_row(name, module, binary_size(size), f"{size / tokens:,.0f}")
            name = ""
        made.add_section()
    return made

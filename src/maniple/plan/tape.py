"""Bytes that a row of operations holds, forward and backward, as autograd frees them.

An operation reads tensors, writes others, and keeps some of either for its backward pass. A tensor is freed once
nothing that follows reads it and nothing keeps it; a gradient lives from the first operation that makes it, going
backward, to the one that made its tensor. All sizes are bytes; a view is no tensor of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class _Op:
    part: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    keeps: tuple[str, ...]
    forward: int
    backward: int
    moves: tuple[str, ...]
    passes: str | None
    weight_first: bool


@dataclass(frozen=True)
class Held:
    """What one pass over a tape holds beside its input.

    kept: for the backward pass, by part; forward: at most, during the forward pass; backward: at most, during the
    backward pass, with what is still kept then and with the gradient of the result. result: the last tensor's size.
    """

    kept: Mapping[str, int]
    forward: int
    backward: int
    result: int

    @property
    def kept_bytes(self) -> int:
        return sum(self.kept.values())


@dataclass
class Tape:
    """Operations in the order of the forward pass. `x` is the input, which its owner counts."""

    sizes: dict[str, int] = field(default_factory=lambda: {"x": 0})
    ops: list[_Op] = field(default_factory=list)
    given: int = 0  # the input's size, for its gradient
    sums_in_place: bool = True  # of two gradients of one tensor
    forgets: dict[str, tuple[str, ...]] = field(default_factory=dict)  # not kept, but computed again with these
    quantized: int = 0  # bytes an element of what a low-precision product keeps of its input; 0: bf16 or fp32

    def op(
        self,
        part: str,
        reads: Sequence[str],
        writes: Mapping[str, int] | None = None,
        keeps: Sequence[str] = (),
        *,
        extra: int = 0,
        forward: int = 0,
        backward: int = 0,
        moves: Sequence[str] | None = None,
        passes: str | None = None,
        weight_first: bool = False,
    ) -> None:
        """Adds an operation. extra: bytes kept beside tensors that are named (statistics, indices); forward, backward:
        bytes that it needs while it runs; moves: those of `reads` that get a gradient, None: all. passes: the one of
        them that, of a sum, keeps the incoming gradient's memory; the others share it. weight_first: the gradient of a
        weight is made before those of `reads`, and what was computed again for it alone is gone by then.
        """
        writes = dict(writes or {})
        self.sizes.update(writes)
        kept = tuple(keeps)
        if extra:
            name = f"{part}#{len(self.ops)}"
            self.sizes[name] = extra
            writes[name] = extra
            kept = (*kept, name)
        self.ops.append(
            _Op(
                part,
                tuple(reads),
                tuple(writes),
                kept,
                forward,
                backward,
                tuple(reads if moves is None else moves),
                passes,
                weight_first,
            )
        )

    def run(self, result: str, *, held: bool = False) -> Held:
        """result: the tensor that is handed on, which stays. held: whoever calls for the backward pass keeps the
        gradient of the result until it is done."""
        last_read = {name: index for index, op in enumerate(self.ops) for name in op.reads}
        kept_by = Counter(name for op in self.ops for name in op.keeps)
        part_of = {name: op.part for op in self.ops for name in op.writes}
        live: dict[str, int] = {}
        most = 0
        for index, op in enumerate(self.ops):
            for name in op.writes:
                live[name] = self.sizes[name]
            most = max(most, sum(live.values()) + op.forward)
            for name in list(live):
                if last_read.get(name, -1) <= index and name != result and (not kept_by[name] or name in self.forgets):
                    del live[name]
        kept: Counter[str] = Counter()
        for name, size in live.items():
            kept[part_of[name]] += size
        return Held(kept, most, self._backward(dict(live), result, kept_by, held), self.sizes[result])

    def _backward(self, live: dict[str, int], result: str, kept_by: Counter[str], held: bool) -> int:
        kept_by = Counter(kept_by)
        _drop(live, kept_by)  # what comes after has let go of the result
        grads = {result: self.sizes[result]}
        most = sum(live.values()) + sum(grads.values())
        for op in reversed(self.ops):
            incoming = [name for name in op.writes if name in grads]
            for name in op.keeps:
                if name in self.forgets and name not in live:
                    live |= {each: self.sizes[each] for each in (name, *self.forgets[name])}
            if incoming:
                fresh = {} if op.passes else {name: self._size(name) for name in op.moves}
                now = sum(live.values()) + sum(grads.values()) + sum(fresh.values())
                if held and result not in grads:
                    now += self.sizes[result]
                if op.weight_first:
                    gone = sum(live[name] for name in op.keeps if name in self.forgets and kept_by[name] == 1)
                    now -= min(gone, sum(fresh.values()))
                # a second gradient is added to the first
                summed = max((size for name, size in fresh.items() if name in grads), default=0)
                most = max(most, now + op.backward, now + (0 if self.sums_in_place else summed))
                given = sum(grads.pop(name) for name in incoming)
                if op.passes:  # the same memory is everyone's gradient: the first one's, as the longest to live
                    fresh = {name: given if name == op.passes else 0 for name in op.moves}
                grads.update({name: size for name, size in fresh.items() if size or name not in grads})
            for name in op.keeps:
                kept_by[name] -= 1
            _drop(live, kept_by)
        return most

    def _size(self, name: str) -> int:
        return self.given if name == "x" else self.sizes[name]


def _drop(live: dict[str, int], kept_by: Counter[str]) -> None:
    for name in [name for name in live if kept_by[name] <= 0]:
        del live[name]

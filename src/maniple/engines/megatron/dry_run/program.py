"""What one rank says to others in a step: its communication, in order, with nothing of torch in it.

A program is recorded by `collectives.py` and compared and simulated with its partners' by `matching.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field, replace

P2P = ("send", "recv")
_ITEM_SIZES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8, "int32": 4, "int64": 8, "uint8": 1, "bool": 1}


@dataclass(frozen=True, slots=True)
class Group:
    """A process group. Its number is its place in the order of creation, which is the same on all ranks; 0 is the
    world. Groups over the same ranks are different groups."""

    number: int
    kind: str  # what it was made for, e.g. expert_model_parallel
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One communication as one rank issues it.

    `sent` and `received` are elements: of each tensor, where several go in one call; of an all_to_all to and from each
    rank of the group. An operation in place (all_reduce, broadcast) has `sent` only. `peer` is a rank in the group: of
    a send or a receive the other side, of a broadcast its root. `way` is where a pipeline stage's message goes to or
    comes from: the next or the previous stage.
    """

    op: str
    group: int
    sent: tuple[int, ...] = ()
    received: tuple[int, ...] = ()
    dtype: str = ""
    peer: int | None = None
    way: str = ""
    row: int = 0
    where: str = field(default="", compare=False)

    @property
    def fixed(self) -> Call:
        """What of it does not depend on the data."""
        return replace(self, sent=(), received=()) if self.row else self

    @property
    def bytes(self) -> int:
        """What this rank puts in (of an all_gather: what it gets; of a broadcast: the message)."""
        elements = self.received if self.op in ("all_gather", "recv") else self.sent
        return sum(elements) * _ITEM_SIZES.get(self.dtype, 1)

    def __str__(self) -> str:
        if self.op in P2P:
            text = f"{self.op} {'to' if self.op == 'send' else 'from'} rank {self.peer} of the group"
        else:
            text = self.op
        text += f" [{self.way} stage]" if self.way else ""
        if not self.dtype:
            return text
        if self.op == "all_to_all":
            sizes = f"{sum(self.sent):,} sent and {sum(self.received):,} received"
            sizes += f" in rows of {self.row:,}" if self.row else ""
        else:
            sizes = " + ".join(f"{n:,}" for n in (self.sent or self.received)[:4])
            more = len(self.sent or self.received) - 4
            sizes += f" + {more} more" if more > 0 else ""
        return f"{text}, {sizes} {self.dtype}"


Issue = tuple[Call, ...]  # one call, or several point-to-point ones that go as a batch
Event = Issue | int  # an int waits for the issue of that number, counted from 0


@dataclass
class Program:
    """Everything that rank `rank` issues and waits for, in the order of its main stream."""

    rank: int
    groups: list[Group]  # of the whole world, in the order of creation
    events: list[Event]

    @property
    def calls(self) -> list[Call]:
        return [call for event in self.events if not isinstance(event, int) for call in event]

    def traffic(self) -> dict[str, dict[str, int]]:
        """By kind of group: `{"calls": how many, "bytes": see Call.bytes}`."""
        calls: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for call in self.calls:
            kind = self.groups[call.group].kind
            calls[kind] += 1
            sizes[kind] += call.bytes if call.op != "recv" else 0
        return {kind: {"calls": calls[kind], "bytes": sizes[kind]} for kind in sorted(calls)}


Roles = dict[tuple[str, int], int]


def all_roles(groups: list[Group]) -> list[Roles]:
    """By rank, the groups that hold it, by what they are to it: (kind, which of that kind) -> number."""
    found: list[Roles] = [{} for _ in groups[0].ranks]
    for group in groups:
        for rank in group.ranks:
            mine = found[rank]
            which = sum(kind == group.kind for kind, _ in mine)
            mine[group.kind, which] = group.number
    return found


def roles(program: Program) -> dict[int, tuple[str, int]]:
    """What the groups of the program's own rank are to it: number -> role."""
    return {number: role for role, number in all_roles(program.groups)[program.rank].items()}


def peers(program: Program) -> dict[tuple[int, int], tuple[tuple[str, int], int]]:
    """Whom its sends and receives are for, in a way that holds for ranks alike: (group, peer) -> (role of the smallest
    group that holds both, place of the peer in it). Of two pipeline stages upstream's `_p2p_ops` uses the world too."""
    mine = {role: number for number, role in roles(program).items()}
    found = {}
    for call in program.calls:
        if call.op in P2P and call.peer is not None and (call.group, call.peer) not in found:
            peer = program.groups[call.group].ranks[call.peer]
            shared = {role: program.groups[n].ranks for role, n in mine.items() if peer in program.groups[n].ranks}
            role = min(shared, key=lambda role: (len(shared[role]), role))
            found[call.group, call.peer] = role, shared[role].index(peer)
    return found


def ranges(ranks: list[int]) -> str:
    """`0-3, 8` for [0, 1, 2, 3, 8]; at most six pieces."""
    pieces: list[list[int]] = []
    for rank in sorted(ranks):
        if pieces and pieces[-1][1] == rank - 1:
            pieces[-1][1] = rank
        else:
            pieces.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in pieces]
    if len(texts) > 6:
        texts = [*texts[:5], f"... ({math.fsum(last - first + 1 for first, last in pieces[5:]):.0f} more)"]
    return ", ".join(texts)

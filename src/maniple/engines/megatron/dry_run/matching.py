"""Compares the programs of all ranks of a job and runs them against each other: what does not fit is a hang.

Two looks at the same programs. `compare` asks of every group whether its members call the same things in the same
order, with sizes that fit, and of every pair whether each send has its receive. `simulate` runs all ranks as NCCL
would and names who waits for whom if they cannot all finish: calls that fit in pairs may still wait in a circle.

How NCCL runs them: a rank issues calls without waiting; the calls on one group run on that rank one after another; a
collective ends when all members run it, a send when its receive runs; waiting for a call holds up all that the rank
issues later. That is NCCL with eagerly made communicators, which is the strictest: what finishes here finishes with one
communicator a pair of ranks too. Calls on different groups are taken to run side by side, whatever a GPU has room for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from maniple.engines.megatron.dry_run.program import P2P, Call, Group, Program, all_roles, peers, ranges, roles


class World:
    """Every rank of a job, each with a program: its own, or that of a rank that stands for it.

    `stands_for(rank)` is the number of the program in `programs`. A program's groups become, for another rank, those
    that have the same role for it (`program.roles`). Raises ValueError if that rank lacks one or is elsewhere in it.
    """

    def __init__(self, programs: Sequence[Program], stands_for: Callable[[int], int]) -> None:
        self.programs = programs
        self.groups: list[Group] = programs[0].groups
        self.size = len(self.groups[0].ranks)
        self.of = [stands_for(rank) for rank in range(self.size)]
        own, facing = [roles(p) for p in programs], [peers(p) for p in programs]
        used = [{call.group for call in p.calls} for p in programs]
        self.numbers: list[dict[int, int]] = []  # by rank: group of the program -> group of this rank
        # by rank: (group, peer) of a message of the program -> the rank at its other end
        self.peers: list[dict[tuple[int, int], int]] = []
        for rank, (which, here) in enumerate(zip(self.of, all_roles(self.groups), strict=True)):
            self.numbers.append({n: here[role] for n, role in own[which].items() if role in here})
            for number in used[which]:
                there, mine = self.groups[number], self.numbers[rank].get(number)
                if mine is None or len(self.groups[mine].ranks) != len(there.ranks):
                    other = programs[which].rank
                    raise ValueError(f"rank {other} cannot stand for rank {rank}: {there.kind} differs between them")
            self.peers.append({key: self.groups[here[r]].ranks[at] for key, (r, at) in facing[which].items()})

    def other(self, rank: int, call: Call) -> int:
        """The rank at the other end of a message of `rank`."""
        assert call.peer is not None
        return self.peers[rank][call.group, call.peer]


@dataclass(frozen=True)
class Fault:
    """One reason why the job would hang, or exchange the wrong things. `times`: as many groups have the like of it."""

    text: str
    like: str  # what is the same about it in other groups
    times: int = 1

    def __str__(self) -> str:
        return self.text + (f" (and {self.times - 1} more groups like it)" if self.times > 1 else "")


def merge(faults: Iterable[Fault]) -> list[Fault]:
    """Faults that differ by their group only become one."""
    found: dict[str, Fault] = {}
    for fault in faults:
        known = found.get(fault.like)
        found[fault.like] = fault if known is None else replace(known, times=known.times + 1)
    return list(found.values())


def same_groups(programs: Sequence[Program]) -> list[Fault]:
    """Making a group is a collective of the whole world: all ranks must make the same ones in the same order."""
    first = programs[0]
    for other in programs[1:]:
        for one, two in zip(first.groups, other.groups, strict=False):
            if one != two:
                said = [
                    f"{g.kind} of {ranges(list(g.ranks))} on rank {p.rank}" for g, p in ((one, first), (two, other))
                ]
                text = f"group {one.number} is {said[0]} and {said[1]}"
                return [Fault(f"ranks make different groups: {text}", "groups")]
        if len(first.groups) != len(other.groups):
            text = f"{len(first.groups)} on rank {first.rank}, {len(other.groups)} on rank {other.rank}"
            return [Fault(f"ranks make different numbers of groups: {text}", "groups")]
    return []


def alike(one: Program, two: Program) -> list[Fault]:
    """Whether the two, of ranks that are taken to be alike, differ in nothing but which of a kind their groups are."""
    mine, other = roles(one), roles(two)
    there, elsewhere = peers(one), peers(two)
    who = f"ranks {one.rank} and {two.rank} are taken to be alike and are not"
    for place, (a, b) in enumerate(zip(one.events, two.events, strict=False)):
        if isinstance(a, int) or isinstance(b, int):
            if a != b:
                return [Fault(f"{who}: at event {place} they wait for different calls", "alike")]
            continue
        for x, y in zip(a, b, strict=False):
            same = mine[x.group] == other[y.group]
            if x.op in P2P and y.op in P2P and x.peer is not None and y.peer is not None:
                same = same and there[x.group, x.peer] == elsewhere[y.group, y.peer]
                x, y = replace(x, peer=None), replace(y, peer=None)
            if not same or replace(x.fixed, group=0) != replace(y.fixed, group=0):
                text = f"{_said(x, one.groups[x.group])} against {_said(y, two.groups[y.group])}"
                return [Fault(f"{who}: {text}", "alike")]
        if len(a) != len(b):
            return [Fault(f"{who}: at event {place} they send batches of {len(a)} and {len(b)}", "alike")]
    if len(one.events) != len(two.events):
        return [Fault(f"{who}: {len(one.events)} events against {len(two.events)}", "alike")]
    return []


def compare(world: World) -> list[Fault]:
    """Faults of all groups of two ranks or more, the first of each group."""
    collectives: list[dict[int, list[Call]]] = []
    messages: list[dict[tuple[str, int, int], list[Call]]] = []
    for program in world.programs:
        by_group, by_peer = defaultdict(list), defaultdict(list)
        for call in program.calls:
            if call.op in P2P:
                assert call.peer is not None
                by_peer[call.op, call.group, call.peer].append(call)
            else:
                by_group[call.group].append(call)
        collectives.append(dict(by_group))
        messages.append(dict(by_peer))

    sequences: list[dict[int, list[Call]]] = [{} for _ in world.groups]  # by group: rank -> what it calls
    sends: dict[tuple[int, int, int], list[Call]] = {}  # group, source, destination
    receives: dict[tuple[int, int, int], list[Call]] = {}
    for rank, which in enumerate(world.of):
        for number, calls in collectives[which].items():
            sequences[world.numbers[rank][number]][rank] = calls
        for (op, number, peer), calls in messages[which].items():
            mine, other = world.numbers[rank][number], world.peers[rank][number, peer]
            (sends if op == "send" else receives)[(mine, rank, other) if op == "send" else (mine, other, rank)] = calls

    faults: list[Fault] = []
    fine: set[tuple[int, ...]] = set()  # the same lists of calls, compared before
    for group in world.groups:
        members = sequences[group.number]
        if not members:
            continue
        lists = [members.get(rank, []) for rank in group.ranks]
        key = tuple(map(id, lists)) if all(lists) else ()
        if key and key in fine:
            continue
        found = _compare_members(group, lists)
        if found is None and key:
            fine.add(key)
        elif found is not None:
            faults.append(found)
    for number, source, target in sorted(sends.keys() | receives.keys()):
        pair = number, source, target
        found = _compare_pair(world.groups[number], source, target, sends.get(pair, []), receives.get(pair, []))
        if found is not None:
            faults.append(found)
    return merge(faults)


def _compare_members(group: Group, lists: list[list[Call]]) -> Fault | None:
    seen: dict[tuple[int, ...], str | None] = {}
    for place in range(max(map(len, lists))):
        calls = [calls[place] if place < len(calls) else None for calls in lists]
        key = tuple(map(id, calls))
        if key not in seen:
            seen[key] = misfit(calls)
        if (why := seen[key]) is not None:
            who: dict[str, list[int]] = defaultdict(list)
            for rank, call in zip(group.ranks, calls, strict=True):
                who["nothing more" if call is None else f"{call} ({call.where})"].append(rank)
            said = "; ".join(f"rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)}: {w}" for w, ranks in who.items())
            return Fault(
                f"call {place} on {group.kind}{_members(group)}: {why}: {said}", f"{group.kind} {place} {[*who]}"
            )
    return None


def misfit(calls: Sequence[Call | None]) -> str | None:
    """Why these calls of a group's members, by rank in the group, cannot be one collective; None if they can."""
    first = calls[0]
    if any(call is None or first is None or call.op != first.op for call in calls):
        return "different operations"
    known = [call for call in calls if call is not None]
    if any(call.dtype != known[0].dtype for call in known):
        return "different types"
    if known[0].op == "all_to_all":
        if any(call.row != known[0].row for call in known):
            return "rows of different lengths"
        if known[0].row and any(len(set(call.sent)) > 1 or len(set(call.received)) > 1 for call in known):
            return None  # numbers that a dry run made up for one rank say nothing of another
        # what one sends to another is what that one expects from it
        for i, call in enumerate(known):
            for j, other in enumerate(known):
                if call.sent[j] != other.received[i]:
                    return f"member {i} sends {call.sent[j]:,} elements to {j}, which expects {other.received[i]:,}"
        return None
    if any(call.sent != known[0].sent or call.received != known[0].received for call in known):
        return "different sizes"
    if any(call.peer != known[0].peer for call in known):
        return "different roots"
    if known[0].op in ("all_gather", "reduce_scatter"):
        small, large = known[0].sent, known[0].received
        if known[0].op == "reduce_scatter":
            small, large = large, small
        if sum(small) * len(calls) != sum(large):
            return f"{sum(small):,} elements of {len(calls)} ranks are not {sum(large):,}"
    return None


def _compare_pair(group: Group, source: int, target: int, sends: list[Call], receives: list[Call]) -> Fault | None:
    if sends is receives:
        return None
    for place in range(max(len(sends), len(receives))):
        sent = sends[place] if place < len(sends) else None
        received = receives[place] if place < len(receives) else None
        why = misfit_pair(sent, received)
        if why is not None:
            texts = [f"{call} ({call.where})" if call else "nothing more" for call in (sent, received)]
            text = f"message {place} from rank {source} to rank {target} on {group.kind}: {why}"
            return Fault(f"{text}: {texts[0]}; {texts[1]}", f"{group.kind} {place} {texts}")
    return None


def misfit_pair(sent: Call | None, received: Call | None) -> str | None:
    """Why this send and this receive are not the two ends of one message; None if they are."""
    if sent is None or received is None:
        return "a receive without a send" if sent is None else "a send without a receive"
    if sent.sent != received.received:
        return f"{sent.sent[0]:,} elements are sent and {received.received[0]:,} expected"
    if sent.dtype != received.dtype:
        return f"{sent.dtype} is sent and {received.dtype} expected"
    if sent.way and sent.way == received.way:
        # what goes to the next stage comes from the previous one
        return f"sent to the {sent.way} stage and taken for a message of the {received.way} one"
    return None


@dataclass(slots=True)
class _Issued:
    """A call, or a batch of sends and receives, that a rank has issued and that has not ended."""

    rank: int
    number: int  # of the issue in the rank's program
    group: int
    calls: tuple[Call, ...]
    open: int  # ends that are not yet met


def simulate(world: World) -> list[Fault]:
    """Runs all ranks to their ends; if they cannot reach them, one fault that names who is stuck in what."""
    size, groups = world.size, world.groups
    events = [world.programs[which].events for which in world.of]
    at, issued = [0] * size, [0] * size
    ended = [bytearray(len(events[rank])) for rank in range(size)]
    queues: dict[tuple[int, int], deque[_Issued]] = defaultdict(deque)  # group, rank
    running: dict[int, list[_Issued]] = defaultdict(list)  # collectives at the head of their queue, by group
    posted: dict[tuple[str, int, int, int], deque[_Issued]] = defaultdict(deque)  # op, group, source, target
    ready = deque(range(size))
    heads: deque[_Issued] = deque()

    def end(entry: _Issued) -> None:
        queue = queues[entry.group, entry.rank]
        queue.popleft()
        ended[entry.rank][entry.number] = 1
        if at[entry.rank] < len(events[entry.rank]) and events[entry.rank][at[entry.rank]] == entry.number:
            ready.append(entry.rank)
        if queue:
            heads.append(queue[0])

    def start(entry: _Issued) -> None:
        members = groups[entry.group].ranks
        if entry.calls[0].op not in P2P:
            arrived = running[entry.group]
            arrived.append(entry)
            if len(arrived) == len(members):
                del running[entry.group]
                for one in arrived:
                    end(one)
            return
        for call in entry.calls:
            other = world.other(entry.rank, call)
            source, target = (entry.rank, other) if call.op == "send" else (other, entry.rank)
            facing = posted["recv" if call.op == "send" else "send", entry.group, source, target]
            if facing:
                partner = facing.popleft()
                for one in (partner, entry):
                    one.open -= 1
                if partner.open == 0 and partner is not entry:
                    end(partner)
            else:
                posted[call.op, entry.group, source, target].append(entry)
        if entry.open == 0:
            end(entry)

    while ready or heads:
        if heads:
            start(heads.popleft())
            continue
        rank = ready.popleft()
        mine, numbers = events[rank], world.numbers[rank]
        while at[rank] < len(mine):
            event = mine[at[rank]]
            if isinstance(event, int):
                if not ended[rank][event]:
                    break
            else:
                entry = _Issued(rank, issued[rank], numbers[event[0].group], event, len(event))
                issued[rank] += 1
                queue = queues[entry.group, rank]
                queue.append(entry)
                if len(queue) == 1:
                    heads.append(entry)
            at[rank] += 1
    stuck = {key: queue[0] for key, queue in queues.items() if queue}
    return [_report(world, at, stuck)] if stuck else []


def _report(world: World, at: list[int], stuck: dict[tuple[int, int], _Issued]) -> Fault:
    """What every rank that cannot go on is in, alike ones in one line."""
    lines: dict[tuple[str, str], tuple[list[int], set[int]]] = {}
    for (number, rank), entry in sorted(stuck.items()):
        group = world.groups[number]
        there = {r for r in group.ranks if (number, r) in stuck and stuck[number, r].calls[0].op not in P2P}
        call = entry.calls[0]
        if call.op in P2P:
            missing = {world.other(rank, c) for c in entry.calls}
        else:
            missing = set(group.ranks) - there
        said = " + ".join(str(c) for c in entry.calls)
        ranks, waits = lines.setdefault((f"{said} on {group.kind}", call.where), ([], set()))
        ranks.append(rank)
        waits |= missing
    ranks_stuck = sorted({rank for _, rank in stuck})
    text = [f"the step cannot end: {len(ranks_stuck):,} of {world.size:,} ranks wait for ever"]
    for (said, where), (ranks, waits) in list(lines.items())[:12]:
        text.append(f"  rank{'s' if len(ranks) > 1 else ''} {ranges(ranks)} in {said} ({where})")
        text.append(f"    waiting for rank{'s' if len(waits) > 1 else ''} {ranges(sorted(waits))}")
    if len(lines) > 12:
        text.append(f"  ... and {len(lines) - 12} more calls")
    return Fault("\n".join(text), "stuck")


def _said(call: Call, group: Group) -> str:
    return f"{call} on {group.kind} ({call.where})"


def _members(group: Group) -> str:
    return f" of ranks {ranges(list(group.ranks))}" if group.number else ""

"""Runs a pipeline schedule on paper: when each task of each rank begins and ends, and who waits for whom.

Times are seconds, as floats. A rank runs its slots in order. A task waits for what it needs:

- F of stage s: F of stage s - 1 of the same micro-batch, and its message's travel if that is on another rank;
- B of stage s: its own F, and B of stage s + 1 with its message;
- W: its own B.

A message takes a link of its own from rank to rank, one after the other, `send_forward` or `send_backward` seconds of
the stage that sends. Where `Schedule.sends_block`, its rank computes nothing meanwhile.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from maniple.plan.schedules import Schedule, Slot, Task

_ALIKE = 1e-9  # share by which groups that take equally long may differ: sums end in other digits


class DeadlockError(RuntimeError):
    """Tasks wait for each other for ever; `waiting` has (rank, task, what it waits for)."""

    def __init__(self, schedule: str, waiting: list[tuple[int, Task, str]]):
        self.waiting = waiting
        said = "; ".join(f"rank {rank}: {task} waits for {reason}" for rank, task, reason in waiting[:8])
        more = f"; and {len(waiting) - 8} more ranks" if len(waiting) > 8 else ""
        super().__init__(f"schedule {schedule} deadlocks: {said}{more}")


@dataclass(frozen=True)
class StageCost:
    """Seconds of one stage's passes over one micro-batch, each alone on its GPU, with what it waits for in them.

    backward is the gradient of the input, weight that of the weights; a schedule that does not split runs both as one.
    exchange_*: how much of forward, and of backward, is token exchange that another micro-batch's work can hide.
    hidden: which share of what could be hidden is.
    """

    forward: float
    backward: float
    weight: float = 0.0
    exchange_forward: float = 0.0
    exchange_backward: float = 0.0
    send_forward: float = 0.0
    send_backward: float = 0.0
    hidden: float = 1.0


class Span(NamedTuple):
    """sent: when each of its messages is there."""

    rank: int
    slot: Slot
    start: float
    end: float
    sent: tuple[float, ...]


@dataclass(frozen=True)
class Simulation:
    """What happened. Ranks idle from the start to the end of the whole pipeline, wherever their own tasks lie."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]  # by rank, in order

    @cached_property
    def seconds(self) -> float:
        return max(span.end for spans in self.spans for span in spans)

    def busy(self, rank: int) -> float:
        return sum(span.end - span.start for span in self.spans[rank])

    def group(self, rank: int, before: int = 0) -> tuple[Span, ...]:
        """What the rank runs while as many micro-batches begin as there are ranks: the last of them, or those so many
        groups before."""
        ranks, spans = self.schedule.ranks, self.spans[rank]
        begun = [at for at, span in enumerate(spans) if (span.slot[0].kind, span.slot[0].chunk) == ("F", 0)]
        last = len(begun) - 1 - before * ranks
        return spans[begun[last - ranks] + 1 : begun[last] + 1]

    @cached_property
    def seconds_a_group(self) -> float | None:
        """Seconds by which each further group of as many micro-batches as there are ranks makes the pipeline longer.

        None while that is not known. It is once all that the last group did, on every rank, came equally long after
        what the group before did: only on that hangs what follows. Until then a rank that has more to do than others
        can still live on its warm-up's lead. Of five groups at least: of fewer, the two would be in the warm-up.
        """
        later = [
            its - other
            for rank in range(self.schedule.ranks)
            for now, then in zip(self.group(rank), self.group(rank, before=1), strict=True)
            for its, other in zip((now.start, *now.sent), (then.start, *then.sent), strict=True)
        ]
        longest = max(later)
        return longest if longest - min(later) <= _ALIKE * longest else None

    def idle_share(self, rank: int) -> float:
        """The rank's bubble: its idle time over the pipeline's time."""
        return 1.0 - self.busy(rank) / self.seconds

    @property
    def bubble_share(self) -> float:
        """Idle time of all ranks over all their time."""
        return 1.0 - sum(map(self.busy, range(len(self.spans)))) / (len(self.spans) * self.seconds)

    def in_flight(self, rank: int) -> list[tuple[float, tuple[int, ...]]]:
        """Micro-batches whose activations the rank holds: (seconds, number by chunk) at each change, from (0, none).

        From the start of F to the end of the last task that reads them: B, or W where backward is split.
        """
        last = "W" if self.schedule.splits_backward else "B"
        changes = []
        for span in self.spans[rank]:
            for task in span.slot:
                if task.kind == "F":
                    changes.append((span.start, 1, task.chunk))
                elif task.kind == last:
                    changes.append((span.end, 0, task.chunk))
        held = [0] * self.schedule.chunks
        out = [(0.0, tuple(held))]
        for time, begins, chunk in sorted(changes):  # at one time what ends goes first: its memory is used again
            held[chunk] += 1 if begins else -1
            out.append((time, tuple(held)))
        return out

    def peak_in_flight(self, rank: int, weights: Sequence[float] | None = None) -> float:
        """The most at once, each chunk counted by its weight (1 if none are given; bytes make it a memory peak)."""
        weights = weights or [1.0] * self.schedule.chunks
        return max(sum(map(float.__mul__, map(float, held), map(float, weights))) for _, held in self.in_flight(rank))


def simulate(schedule: Schedule, costs: Sequence[StageCost]) -> Simulation:
    """Runs it. costs: one a stage, in the model's order, as many as ranks x chunks.

    Raises DeadlockError, naming who waits for what, if the orders of the ranks do not fit together, and ValueError for
    a wrong number of costs.
    """
    ranks, last = schedule.ranks, schedule.ranks * schedule.chunks - 1
    if len(costs) != last + 1:
        raise ValueError(f"{len(costs)} stage costs for {last + 1} stages of schedule {schedule.name}")
    place = {stage: (rank, chunk) for rank, row in enumerate(schedule.stages) for chunk, stage in enumerate(row)}
    done: set[tuple[int, tuple[str, int, int]]] = set()  # tasks by rank
    arrived: dict[tuple[int, Task], float] = {}  # by rank it is for: when a neighbour's message is there
    free = [0.0] * ranks
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    at = [0] * ranks
    durations: dict[tuple, float] = {}  # of slots alike: all but their micro-batches
    spans: list[list[Span]] = [[] for _ in range(ranks)]

    # of a pass, by rank: whether it waits for a neighbour's message, and whom its own message is for
    receives = {
        (rank, kind, chunk): stage > 0 if kind == "F" else stage < last
        for stage, (rank, chunk) in place.items()
        for kind in "FB"
    }
    onto = {
        (rank, kind, chunk): place.get(stage + step)
        for stage, (rank, chunk) in place.items()
        for kind, step in (("F", 1), ("B", -1))
    }

    def ready(rank: int, slot: Slot) -> float | None:
        """When the slot's needs (`_needs`) are met, None while one of them has not run."""
        when = free[rank]  # not before the rank's own results are there
        for task in slot:
            kind, micro_batch, chunk = task
            if kind != "F" and (rank, ("F" if kind == "B" else "B", micro_batch, chunk)) not in done:
                return None
            if kind != "W" and receives[rank, kind, chunk]:
                at_hand = arrived.get((rank, task))
                if at_hand is None:
                    return None
                if at_hand > when:
                    when = at_hand
        return when

    awake = list(range(ranks))
    while awake:
        rank = awake.pop()
        program = schedule.programs[rank]
        while at[rank] < len(program):
            slot = program[at[rank]]
            start = ready(rank, slot)
            if start is None:
                break
            kind = rank, tuple([(task.kind, task.chunk) for task in slot])
            if kind not in durations:
                durations[kind] = _duration(slot, schedule, rank, costs)
            end = start + durations[kind]
            at[rank] += 1
            free[rank] = end
            sent = []
            for task in slot:
                done.add((rank, task))
                receiver = None if task.kind == "W" else onto[rank, task.kind, task.chunk]
                if receiver is None:
                    continue
                other, chunk = receiver
                key = (other, Task(task.kind, task.micro_batch, chunk))
                if other == rank:
                    arrived[key] = end
                    continue
                cost = costs[schedule.stages[rank][task.chunk]]
                send = cost.send_forward if task.kind == "F" else cost.send_backward
                arrived[key] = link_free[rank, other] = max(end, link_free[rank, other]) + send
                sent.append(arrived[key])
                if schedule.sends_block:
                    free[rank] = max(free[rank], arrived[key])
                if other not in awake:
                    awake.append(other)
            spans[rank].append(Span(rank, slot, start, end, tuple(sent)))
    waiting = [
        (rank, *_missing(schedule, rank, at[rank], done, arrived, last, place))
        for rank in range(ranks)
        if at[rank] < len(schedule.programs[rank])
    ]
    if waiting:
        raise DeadlockError(schedule.name, waiting)
    return Simulation(schedule, tuple(map(tuple, spans)))


def _needs(
    schedule: Schedule, rank: int, task: Task, last: int, place: dict[int, tuple[int, int]]
) -> list[tuple[str, tuple[int, Task]]]:
    kind, micro_batch, chunk = task
    if kind == "W":
        return [("own", (rank, Task("B", micro_batch, chunk)))]
    stage = schedule.stages[rank][chunk]
    needs = [("own", (rank, Task("F", micro_batch, chunk)))] if kind == "B" else []
    if stage > 0 if kind == "F" else stage < last:
        needs.append(("message", (rank, task)))
    return needs


def _duration(slot: Slot, schedule: Schedule, rank: int, costs: Sequence[StageCost]) -> float:
    parts = []
    for task in slot:
        cost = costs[schedule.stages[rank][task.chunk]]
        if task.kind == "F":
            parts.append((cost.forward, cost.exchange_forward, cost.hidden))
        elif task.kind == "W":
            parts.append((cost.weight, 0.0, cost.hidden))
        else:
            whole = cost.backward + (0.0 if schedule.splits_backward else cost.weight)
            parts.append((whole, cost.exchange_backward, cost.hidden))
    alone = sum(whole for whole, _, _ in parts)
    if len(parts) == 1:
        return alone
    # Each one's exchange can run under the others' computation, and under nothing of its own.
    hidden = sum(
        share * min(exchange, sum(whole - other for whole, other, _ in parts[:n] + parts[n + 1 :]))
        for n, (_, exchange, share) in enumerate(parts)
    )
    return alone - hidden


def _missing(schedule, rank, at, done, arrived, last, place) -> tuple[Task, str]:
    """The first task of the slot that cannot run, and what for."""
    for task in schedule.programs[rank][at]:
        for table, key in _needs(schedule, rank, task, last, place):
            if key in (done if table == "own" else arrived):
                continue
            if table == "own":
                return task, f"its own {key[1]}"
            stage = schedule.stages[rank][task.chunk] + (-1 if task.kind == "F" else 1)
            other, chunk = place[stage]
            return task, f"{task._replace(chunk=chunk)} of rank {other}"
    raise AssertionError("a slot with all it needs has run")

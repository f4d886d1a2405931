"""Pipeline schedules as tables: what each pipeline rank runs, in which order.

A pipeline of p ranks holds v model chunks a rank. A *task* is one chunk's pass over one micro-batch: `F` forward, `B`
backward (the gradient of its input, and of its weights too unless the schedule splits it), `W` the gradient of weights.
A *slot* is what a rank runs at one time: one task, or a forward and a backward of different micro-batches together, so
that one's token exchange runs under the other's matrix products (as DualPipe does, DeepSeek-V3 report section 3.2.1).

Sources: 1F1B and interleaving, Narayanan et al. 2021 (arXiv 2104.04473); ZB-H1, Qi et al. 2023 (arXiv 2401.10241); ZBV,
Qi et al. 2024 (arXiv 2405.15362); interleaved orders and warm-up lengths are those of Megatron-Core's schedules.py.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Literal, NamedTuple

from maniple.errors import UserError

Kind = Literal["F", "B", "W"]


class Task(NamedTuple):
    kind: Kind
    micro_batch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}" + (f" of chunk {self.chunk}" if self.chunk else "")


Slot = tuple[Task, ...]


@dataclass(frozen=True)
class Schedule:
    """programs[rank] holds the slots in order; stages[rank][chunk] is the place of that chunk in the model, from 0."""

    name: str
    programs: tuple[tuple[Slot, ...], ...]
    stages: tuple[tuple[int, ...], ...]
    splits_backward: bool = False
    sends_block: bool = False  # a rank computes nothing while it sends

    @property
    def ranks(self) -> int:
        return len(self.programs)

    @property
    def chunks(self) -> int:
        return len(self.stages[0])


SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zbv")
SPLIT = ("zb-h1", "zbv")  # backward passes in two; simulated only, as the engine runs the others


def build(name: str, ranks: int, micro_batches: int, chunks: int = 1, *, overlap: bool = False) -> Schedule:
    """The schedule of that name. `overlap` joins forwards and backwards into slots (1f1b and interleaved only).

    Raises UserError for an unknown name, sizes below 1, chunks that the schedule does not have (1f1b and zb-h1 one, zbv
    two, interleaved more than one), and `overlap` where backward is split.
    """
    if min(ranks, micro_batches, chunks) < 1:
        raise UserError(
            f"a schedule of {ranks} ranks, {chunks} chunks, {micro_batches} micro-batches: each is at least 1"
        )
    wants = {"1f1b": 1, "zb-h1": 1, "zbv": 2}
    if name not in SCHEDULES:
        raise UserError(f"no pipeline schedule is named {name!r}: choose one of {', '.join(SCHEDULES)}")
    if name == "interleaved" and chunks == 1:
        raise UserError("schedule interleaved has more than one model chunk a rank: set parallel.virtual_pipeline_size")
    if wants.get(name, chunks) != chunks:
        how = "leave it out" if wants[name] == 1 else f"set it to {wants[name]}"
        number = "one model chunk" if wants[name] == 1 else f"{wants[name]} model chunks"
        raise UserError(f"schedule {name} has {number} a rank, not {chunks}: parallel.virtual_pipeline_size, {how}")
    if name in SPLIT:
        if overlap:
            raise UserError(f"schedule {name} already fills its waits with weight gradients: leave overlap out")
        return zb_h1(ranks, micro_batches) if name == "zb-h1" else zbv(ranks, micro_batches)
    return interleaved(ranks, micro_batches, chunks, overlap=overlap)


def interleaved(ranks: int, micro_batches: int, chunks: int = 1, *, overlap: bool = False) -> Schedule:
    """1F1B with any number of chunks; with one it is plain 1F1B.

    Micro-batches go through a rank's chunks in groups of `ranks`. Before the first backward rank r runs (p - r - 1)
    forwards with one chunk, 2 (p - r - 1) + (v - 1) p with several, and one more with `overlap`, so that the two of a
    slot never wait for each other. Raises UserError for several chunks and a group that is not full: it would deadlock.
    """
    if chunks > 1 and micro_batches % ranks:
        raise UserError(
            f"{micro_batches} micro-batches do not divide over {ranks} pipeline ranks, as interleaving needs"
        )
    order = []
    for start in range(0, micro_batches, ranks):
        group = range(start, min(start + ranks, micro_batches))
        order += [(micro_batch, chunk) for chunk in range(chunks) for micro_batch in group]
    forwards = [Task("F", micro_batch, chunk) for micro_batch, chunk in order]
    backwards = [Task("B", micro_batch, chunks - 1 - chunk) for micro_batch, chunk in order]
    programs = []
    for rank in range(ranks):
        after = ranks - rank - 1
        warm_up = (after if chunks == 1 else 2 * after + (chunks - 1) * ranks) + overlap
        warm_up = min(warm_up, len(order))
        slots: list[Slot] = [(task,) for task in forwards[:warm_up]]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            slots += [(forward, backward)] if overlap else [(forward,), (backward,)]
        slots += [(task,) for task in backwards[len(order) - warm_up :]]
        programs.append(tuple(slots))
    name = "1f1b" if chunks == 1 else "interleaved"
    return Schedule(
        name + (" with overlap" if overlap else ""),
        tuple(programs),
        tuple(tuple(chunk * ranks + rank for chunk in range(chunks)) for rank in range(ranks)),
        # upstream's plain 1F1B waits for its messages; with several chunks they travel while others compute
        sends_block=chunks == 1,
    )


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """ZB-H1: 1F1B whose weight gradients wait, at most r micro-batches on rank r, to fill the end of the step.

    No rank holds more than p micro-batches' activations, as rank 0 of 1F1B does. With equal times a rank idles for
    (p - 1)(F + B - W) a step, against (p - 1)(F + B + W).
    """
    programs = []
    for rank in range(ranks):
        warm_up = min(ranks - rank - 1, micro_batches)
        slots: list[Slot] = [(Task("F", number),) for number in range(warm_up)]
        weights = 0
        for number in range(micro_batches):
            if number + warm_up < micro_batches:
                slots.append((Task("F", number + warm_up),))
            slots.append((Task("B", number),))
            if number >= rank:
                slots.append((Task("W", weights),))
                weights += 1
        slots += [(Task("W", number),) for number in range(weights, micro_batches)]
        programs.append(tuple(slots))
    return Schedule("zb-h1", tuple(programs), tuple((rank,) for rank in range(ranks)), splits_backward=True)


def zbv(ranks: int, micro_batches: int) -> Schedule:
    """ZBV: two chunks a rank, placed as a V, so that the first rank has both ends of the model.

    Rank r holds stages r and 2p - 1 - r. Activations of p micro-batches (2p chunks) at most, on every rank alike. With
    equal times nothing idles between the first task and the last. It is laid out for 2p micro-batches or more; of
    fewer, the tasks of those that are not there are left out.
    """
    planned = max(micro_batches, 2 * ranks - 1)
    programs = []
    for rank in range(ranks):
        counts: dict[tuple[Kind, int], int] = defaultdict(int)
        order: list[Task] = []

        def run(words: str, order: list[Task] = order, counts: dict[tuple[Kind, int], int] = counts) -> None:
            for word in words.split():
                key: tuple[Kind, int] = (word[0], int(word[1]))  # type: ignore[assignment]
                order.append(Task(key[0], counts[key], key[1]))
                counts[key] += 1

        after = ranks - rank
        run("F0 " * (2 * after - 1))
        run("F1 F0 " * rank)
        run("F1 B1 W1 " * after)
        while counts["F", 1] < counts["F", 0] or counts["F", 0] < planned:
            run(("F0 " if counts["F", 0] < planned else "") + "B0 W0 F1 B1 W1")
        run("B0 B1 " * rank)
        run("B0 W0 " * after)
        run("W1 " * (counts["B", 1] - counts["W", 1]))
        run("W0 " * (counts["B", 0] - counts["W", 0]))
        programs.append(tuple((task,) for task in order if task.micro_batch < micro_batches))
    return Schedule(
        "zbv",
        tuple(programs),
        tuple((rank, 2 * ranks - 1 - rank) for rank in range(ranks)),
        splits_backward=True,
    )

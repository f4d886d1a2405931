"""In which order a pipeline rank runs its passes, as Megatron-Core's schedules do, until the pipeline is full; and the
fullest moment of it.

Memory is at its most then: what follows takes turns of a forward and a backward pass that are all alike.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import NamedTuple

from maniple.config.schema import TrainConfig
from maniple.plan import schedules
from maniple.plan.memory_chunks import Chunk, Piece
from maniple.plan.stages import Placement


class Pass(NamedTuple):
    """Forward or backward, of a chunk and a micro-batch. Where a schedule splits backward passes, what is kept is there
    until the weights' gradients are made: keeps says that they are not yet, weights that this pass makes them."""

    forward: bool
    chunk: int
    micro_batch: int
    keeps: bool = False
    weights: bool = False


def passes(place: Placement, rank: int, *, overlapped: bool = False, schedule: str | None = None) -> list[Pass]:
    """Of pipeline rank `rank`: a prefix of its step that holds the fullest moment, and all of what it began.

    overlapped: one micro-batch's exchange runs beside another's backward pass, which takes one forward pass more.
    schedule: one that splits backward passes, from `schedules.SPLIT`; all others are the engine's own.
    """
    if schedule in schedules.SPLIT:
        count = min(place.micro_batches, 3 * place.pipeline)
        slots = schedules.build(schedule, place.pipeline, count, place.chunks, overlap=overlapped).programs[rank]
        return [
            Pass(task.kind == "F", task.chunk, task.micro_batch, task.kind == "B", task.kind == "W")
            for slot in slots
            for task in slot
        ]
    stages, chunks, rest = place.pipeline, place.chunks, place.pipeline - 1 - rank
    if chunks == 1:
        count = min(place.micro_batches, rest + 2 + overlapped)
        warm = min(rest + overlapped, count)
        table = [(micro_batch, 0) for micro_batch in range(count)]
    else:
        count = min(place.micro_batches, 3 * stages)
        table = _interleaved(count, chunks, stages)
        warm = min(2 * rest + (chunks - 1) * stages + overlapped, len(table))
    forward = [Pass(True, chunk, micro_batch) for micro_batch, chunk in table]
    backward = [Pass(False, chunks - 1 - chunk, micro_batch) for micro_batch, chunk in table]
    turns = [each for pair in zip(forward[warm:], backward, strict=False) for each in pair]
    return forward[:warm] + turns + backward[len(forward) - warm :]


def _interleaved(count: int, chunks: int, stages: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) by turn: groups of as many micro-batches as there are stages pass chunk after chunk."""
    return [
        (micro_batch, chunk)
        for first in range(0, count, stages)
        for chunk in range(chunks)
        for micro_batch in range(first, min(first + stages, count))
    ]


def fullest_moment(
    config: TrainConfig, where: Placement, rank: int, chunks: list[Chunk], one: int, schedule: str | None = None
) -> tuple[int, str, Counter[str], int]:
    """(bytes at the fullest moment, where it is, what is kept then by part, passes in flight). one: bytes of a message.

    Megatron-Core's schedules hold, beside what waits for its backward pass, the last micro-batch's messages: what came,
    what was sent, and the gradients of both.
    """
    best, said, in_flight = 0, "", 0
    fullest: tuple[Counter[str], list[int]] = (Counter(), [])
    kept = [chunk.kept() for chunk in chunks]
    sizes = [sum(parts.values()) for parts in kept]
    middle = 0 < rank < where.pipeline - 1 or where.chunks > 1
    overlapped = config.moe.overlap_exchange
    flying: list[int] = []  # chunks of the passes that wait for their backward
    flying_bytes = messages = 0
    order = passes(where, rank, overlapped=overlapped, schedule=schedule)
    beside: Chunk | None = None
    known: dict[tuple, tuple[int, str, Counter[str]]] = {}  # of passes, which are all alike
    for number, each in enumerate(order):
        chunk = chunks[each.chunk]
        if each.weights:  # its products hold less than those of the pass before it
            flying.remove(each.chunk)
            flying_bytes -= sizes[each.chunk]
            continue
        if not each.forward:
            flying.remove(each.chunk)
            flying_bytes -= sizes[each.chunk]
            messages = 2 * one if where.pipeline > 1 else 0
            if beside is not None:  # it ran with the one before
                beside = None
                continue
        elif overlapped and number + 1 < len(order) and not order[number + 1].forward:
            # whose backward pass runs with this forward pass; one that has just run has none to run beside
            beside = chunks[order[number + 1].chunk] if order[number + 1].chunk in flying else None
        partner = None if beside is None else order[number + 1].chunk
        others = flying_bytes - (0 if partner is None else sizes[partner])
        others += messages * (2 if each.forward and middle else 1)
        what = (each.chunk, each.forward, partner)
        if what not in known:
            known[what] = _pass(chunk, each.forward) if beside is None else _both(chunk, beside)
        most, moment, own = known[what]
        if others + most > best:
            direction = "forward" if each.forward else "backward"
            waiting = list(flying)
            if partner is not None:
                waiting.remove(partner)
            best, said, fullest, in_flight = others + most, f"{direction}, {moment}", (own, waiting), len(flying) + 1
        if each.forward or each.keeps:
            flying.append(each.chunk)
            flying_bytes += sizes[each.chunk]
    parts = Counter(fullest[0])
    for index in fullest[1]:
        parts.update(kept[index])
    return best, said, parts, in_flight


def _both(ahead: Chunk, back: Chunk) -> tuple[int, str, Counter[str]]:
    """As `_pass`, of a forward and a backward pass that run together, piece beside piece."""
    best, moment, parts = 0, "", Counter[str]()
    front = Counter[str]({"received": ahead.given} if ahead.given else {})
    kept, waiting = back.kept(), 0
    for forward, backward in _side_by_side(ahead.pieces, back.pieces[::-1]):
        # what one computes and what the other does take turns
        here = max(
            forward.held.forward if forward is not None else 0,
            backward.held.backward - backward.held.kept_bytes + waiting if backward is not None else 0,
        )
        here += sum(front.values()) + sum(kept.values())
        if here > best:
            names = [piece.name for piece in (forward, backward) if piece is not None]
            best, moment, parts = here, " beside ".join(names), front + kept
        if forward is not None:
            front.update(forward.held.kept)
        if backward is not None:
            kept.subtract(backward.held.kept)
            waiting += backward.waits - backward.takes
    return best, moment, parts


def _side_by_side(ahead: tuple[Piece, ...], back: tuple[Piece, ...]) -> list[tuple[Piece | None, Piece | None]]:
    """Layers run in pairs; what comes before the first and after the last one by itself."""

    def layers(pieces: tuple[Piece, ...]) -> tuple[int, int]:
        numbers = [number for number, piece in enumerate(pieces) if piece.is_layer]
        return (numbers[0], numbers[-1] + 1) if numbers else (len(pieces), len(pieces))

    (first, end), (back_first, back_end) = layers(ahead), layers(back)
    pairs: list[tuple[Piece | None, Piece | None]] = [(piece, None) for piece in ahead[:first]]
    pairs += [(None, piece) for piece in back[:back_first]]
    for mine, other in itertools.zip_longest(_by_layer(ahead[first:end]), _by_layer(back[back_first:back_end])):
        # what is between layers, of an MTP depth, runs by itself
        pairs += [(piece, None) for piece in (mine or ())[:-1]]
        pairs += [(None, piece) for piece in (other or ())[:-1]]
        pairs.append((mine[-1] if mine else None, other[-1] if other else None))
    pairs += [(piece, None) for piece in ahead[end:]]
    return pairs + [(None, piece) for piece in back[back_end:]]


def _by_layer(pieces: tuple[Piece, ...]) -> list[tuple[Piece, ...]]:
    """Each layer, behind what comes before it. The last of `pieces` is a layer."""
    ends = [number + 1 for number, piece in enumerate(pieces) if piece.is_layer]
    return [pieces[start:end] for start, end in itertools.pairwise([0, *ends])]


def _pass(chunk: Chunk, forward: bool) -> tuple[int, str, Counter[str]]:
    """(bytes at the fullest moment of one pass, in which piece, what is kept then by part)."""
    kept = chunk.kept()
    best, moment, parts = 0, "", Counter[str]()
    if forward:
        behind = Counter[str]({"received": chunk.given} if chunk.given else {})
        for piece in chunk.pieces:
            here = sum(behind.values()) + piece.held.forward
            if here > best:
                best, moment, parts = here, piece.name, behind.copy()
            behind.update(piece.held.kept)
        return best, moment, parts
    waiting = 0
    for piece in reversed(chunk.pieces):
        here = sum(kept.values()) - piece.held.kept_bytes + piece.held.backward + waiting
        if here > best:
            best, moment, parts = here, piece.name, kept.copy()
        kept.subtract(piece.held.kept)
        waiting += piece.waits - piece.takes
    return best, moment, parts

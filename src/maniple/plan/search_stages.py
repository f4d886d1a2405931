"""Stages of any sizes and recomputed layers one by one, for the layouts that could gain most by them.

The search looks at stages that are even or balanced, and at recomputation alike in all of them. Here each of its
shapes (TP, PP, chunks, EP, ETP, micro-batch, modules) is a linear model, whose relaxed program says at once what the
shape could reach at best. Those of the best are solved as integer programs, planned in full, and solved again with the
model put through what that said, as long as this changes something. Only what fits by the full plan counts.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from maniple.models.card import ModelCard
from maniple.plan.memory import RankMemory
from maniple.plan.search_bounds import Bounds
from maniple.plan.search_linear import Cut, Linear, linear_of
from maniple.plan.search_program import NODES, solve
from maniple.plan.search_recompute import fewest
from maniple.plan.search_space import MODULES, Layout, Recompute, even_stages, layout_text
from maniple.plan.stages import Placement

_ROUNDS = 3
_DOUBT = 1.1  # an interleaved pipeline's model may be so much slower than the full plan
_RELAXED = 48  # shapes whose relaxed program is solved
_RELAXED_WORK = 3000  # stages x runs of these, after which no other is
_SMALL = 12  # shapes whose integer program is solved, if it is small
_SIZE = 12  # stages x runs of a large one, that is interleaved: it takes a second or more, and branches gain little
_WORK = 100  # stages x runs of all large ones, after which no other is begun


@dataclass(frozen=True)
class Solved:
    """A layout that a program found. model: seconds of the pipeline and bytes of the fullest rank by its model."""

    layout: Layout
    model_seconds: float
    model_bytes: float


@dataclass(frozen=True)
class Tried:
    """shapes: of all, or of those that could win; too_large: those whose states alone do not fit, however they are cut,
    of all if nothing fits; relaxed, solved: how many programs, and
    infeasible: those of the relaxed that have no answer; fits: answers that fit by the full plan and could be faster
    than what was found; misfits: how many do not fit."""

    shapes: int
    too_large: int
    relaxed: int
    infeasible: int
    solved: int
    misfits: int
    fits: tuple[Solved, ...]


@dataclass(frozen=True)
class Shape:
    """Layouts alike but for stages and recomputed layers: `layout` is one of them, `where` its layers' places."""

    layout: Layout
    where: Placement
    stages_free: bool
    layers_free: bool

    def is_of(self, other: Layout) -> bool:
        mine = self.layout
        return (mine.shape, mine.chunks, mine.micro_batch) == (other.shape, other.chunks, other.micro_batch)


def shapes_to_try(
    legal: Sequence[tuple[Layout, Placement, list[Recompute | None]]], *, stages_held: bool, overlapped: bool
) -> list[Shape]:
    """Of legal layouts, with how they may compute again, each shape once."""
    out: dict[tuple, Shape] = {}
    for layout, where, kinds in legal:
        own = kinds == [None]
        for modules in [()] if own else [(), *((module,) for module in MODULES)]:
            kind = None if own else Recompute("selective", None, modules) if modules else Recompute()
            key = layout.shape, layout.chunks, layout.micro_batch, modules
            free = not stages_held and layout.pipeline > 1
            out[key] = Shape(replace(layout, recompute=kind), where, free, not (own or modules or overlapped))
    return [shape for shape in out.values() if shape.stages_free or shape.layers_free]


def improve(
    bounds: Bounds,
    groups: Iterable[tuple[float, Sequence[Shape]]],
    ceiling: int,
    ranks_of: Callable[[Layout], Sequence[RankMemory]],
    seconds: float,
    pipeline_seconds: Callable[[Layout], float],
    tail: float,
) -> Tried:
    """What programs find that takes less than `seconds`, the best so far (infinite if nothing fits).

    groups: shapes, and seconds that each of them takes at least, in order of these: only those are asked for that could
    win, and all if nothing fits.
    ranks_of: each rank's full plan; pipeline_seconds: of the full plan; tail: seconds of a step, about, beside the
    pipeline's.
    """
    looked_at = too_large = 0
    if seconds == float("inf"):
        every = [shape for _, shapes in groups for shape in shapes]
        some = _smallest(bounds, every, ceiling)
        looked_at, too_large = len(every), len(every) - len(some)
        groups = [(0.0, some[:_RELAXED])]
    coming = iter(groups)
    following = next(coming, None)
    shapes: list[Shape] = []
    heap: list[tuple[float, int, Linear | None]] = []
    relaxed = relaxed_work = infeasible = solved = small = work = misfits = 0
    fits: list[Solved] = []
    best = seconds - tail
    while heap or following is not None:
        if following is not None and (not heap or following[0] - tail <= heap[0][0]):
            if following[0] - tail >= best:
                break
            for shape in _smallest(bounds, following[1], ceiling):
                heapq.heappush(heap, (bounds.seconds(shape.layout, shape.where) - tail, len(shapes), None))
                shapes.append(shape)
            following = next(coming, None)
            continue
        least, number, linear = heapq.heappop(heap)
        if least >= best:
            break
        shape = shapes[number]
        if linear is None:
            if relaxed == _RELAXED or relaxed_work >= _RELAXED_WORK:
                continue
            linear = _model(bounds, shape, ceiling, ranks_of)
            relaxed, relaxed_work = relaxed + 1, relaxed_work + _size(linear)
            start = linear.cut_of(shape.where, ())
            bound = solve(linear, relaxed=True, fixed=None if shape.stages_free else start)
            if bound is None:
                infeasible += 1
            else:
                heapq.heappush(heap, (bound.seconds, number, linear))
            continue
        if small == _SMALL if not _is_large(linear) else work >= _WORK:
            continue
        found, times, wrong = _solved(bounds, shape, linear, ceiling, ranks_of)
        solved, misfits = solved + times, misfits + wrong
        if _is_large(linear):
            work += times * _size(linear)
        else:
            small += 1
        doubt = 1.0 if linear.chunks == 1 else _DOUBT
        for one in found:
            if one.model_seconds < doubt * best:
                fits.append(one)
                best = min(best, pipeline_seconds(one.layout))
    return Tried(looked_at or len(shapes), too_large, relaxed, infeasible, solved, misfits, tuple(fits))


def _smallest(bounds: Bounds, shapes: Sequence[Shape], ceiling: int) -> list[Shape]:
    """Those whose states would fit if they were dealt evenly to the ranks, and so could with some cut. First what is
    smallest, which is likeliest to fit."""
    sizes = {shape: sum(bounds.states(shape.layout, shape.where)) / shape.where.pipeline for shape in shapes}
    some = [shape for shape in shapes if sizes[shape] <= ceiling]
    return sorted(some, key=lambda shape: (sizes[shape], shape.layout.micro_batch))


def least_missing(
    bounds: Bounds, shape: Shape, ceiling: int, ranks_of: Callable[[Layout], Sequence[RankMemory]]
) -> float | None:
    """Bytes above the ceiling that the shape's fullest rank needs by the linear model, cut and computed again any way;
    None if its stages cannot be cut so at all."""
    linear = _model(bounds, shape, ceiling, ranks_of)
    if shape.layers_free:
        card = bounds.card
        whole = linear.cut_of(shape.where, range(card.num_layers + card.num_mtp_layers))
        sizes = [rank.total for rank in ranks_of(replace(shape.layout, recompute=Recompute("full")))]
        linear = linear.through(whole, sizes)
    fixed = None if shape.stages_free else linear.cut_of(shape.where, ())
    answer = solve(linear, "memory", fixed=fixed, nodes=1 if _is_large(linear) else NODES)
    return None if answer is None else answer.missing


def _model(bounds: Bounds, shape: Shape, ceiling: int, ranks_of: Callable[[Layout], Sequence[RankMemory]]) -> Linear:
    linear = linear_of(bounds, shape.layout, shape.where, ceiling, recomputes=shape.layers_free)
    return linear.through(linear.cut_of(shape.where, ()), [rank.total for rank in ranks_of(shape.layout)])


def _size(linear: Linear) -> int:
    return linear.stages * len(linear.runs)


def _is_large(linear: Linear) -> bool:
    return linear.chunks > 1 and _size(linear) > _SIZE


def _solved(
    bounds: Bounds,
    shape: Shape,
    linear: Linear,
    ceiling: int,
    ranks_of: Callable[[Layout], Sequence[RankMemory]],
) -> tuple[list[Solved], int, int]:
    """(What fits, best last; programs; how many answers did not fit)."""
    whole = linear.cut_of(shape.where, ())
    start: Cut | None = None
    few: Layout | None = None
    if any(rank.total > ceiling for rank in ranks_of(shape.layout)):
        less = replace(shape.layout, recompute=Recompute("full"))
        few = fewest(less, shape.where, bounds.card, ceiling, ranks_of) if shape.layers_free else None
        if few is not None:
            assert few.recompute is not None
            start = linear.cut_of(shape.where, few.recompute.layers)
            linear = linear.through(start, [rank.total for rank in ranks_of(few)])
    else:
        start = whole
    out: list[Solved] = []
    if start is not None:
        out.append(Solved(few or shape.layout, linear.seconds(start), max(linear.sizes(start))))
    seen: set[Cut | None] = {start}
    misfits = times = 0
    nodes = 1 if _is_large(linear) else NODES
    for _ in range(_ROUNDS):
        answer = solve(linear, fixed=None if shape.stages_free else whole, start=start, nodes=nodes)
        times += 1
        if answer is None or answer.cut is None or answer.cut in seen:
            break
        seen.add(answer.cut)
        layout = layout_of(shape.layout, linear, answer.cut, bounds.card)
        if not shape.stages_free:
            layout = replace(layout, stages=shape.layout.stages)
        sizes = [rank.total for rank in ranks_of(layout)]
        if max(sizes) <= ceiling:
            out.append(Solved(layout, answer.seconds, max(linear.sizes(answer.cut))))
            start = answer.cut
        else:
            misfits += 1
        if _is_large(linear) and (max(sizes) <= ceiling or times * _size(linear) >= _WORK):
            break
        linear = linear.through(answer.cut, sizes)
    return out, times, misfits


def layout_of(layout: Layout, linear: Linear, cut: Cut, card: ModelCard) -> Layout:
    """`layout` with the stages and the recomputed layers of a cut; an even cut is none of its own."""
    text, layers = linear.layers_of(cut)
    even = card.num_layers % linear.stages == 0 and text == layout_text(even_stages(card, linear.stages))
    recompute = Recompute("full", None, (), layers) if layers else layout.recompute
    return replace(layout, stages=None if even else text, recompute=recompute)

"""The fastest layout of a job that fits its GPUs: all are bounded, and only those are costed that could win.

`search_bounds` says at once what a layout needs at least, and what all layouts of a group do (`search_groups`). Those
whose bound of memory is over the ceiling are left out; the others are costed in full, best bound of time first, until
no bound is better than what was found. What is left out cannot be better: the answer is that of costing them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from maniple.config.schema import TrainConfig
from maniple.hardware.card import GPU
from maniple.models.card import ModelCard
from maniple.plan import memory, search_overlap, search_space, search_stages
from maniple.plan.imbalance import Imbalance
from maniple.plan.memory import RankMemory
from maniple.plan.profile import profile_of
from maniple.plan.report import BELOW
from maniple.plan.search_bounds import Bounds
from maniple.plan.search_groups import Legal, Opened, Space
from maniple.plan.search_recompute import fewest
from maniple.plan.search_space import Layout
from maniple.plan.stages import Placement, check_number, place
from maniple.plan.time import StepTime, estimate, make_job

# shares of a GPU's memory below which the best layout is looked for too; the first keeps the error band in it
CEILINGS = (1 - BELOW, 0.9, 0.8, 0.7, 0.6, 0.5)

_OVERLAPPED = 12  # layouts that are planned with overlapped exchange at most
_WORTH = 0.01  # share of a step that fewer recomputed layers have to save, for the memory that they take


@dataclass(frozen=True)
class Costed:
    """A layout with its full plan. `memory` is that of the fullest pipeline rank."""

    layout: Layout
    config: TrainConfig
    where: Placement
    memory: RankMemory
    time: StepTime

    @property
    def tgs(self) -> float:
        """Tokens a second and GPU."""
        return self.time.tokens_per_second_per_gpu

    @property
    def tokens_per_second(self) -> float:
        """Of the whole job."""
        return self.tgs * self.where.world_size


@dataclass(frozen=True)
class Programs:
    """What integer programs did. found: layouts of theirs that fit; models: what their linear models said of each,
    seconds of the pipeline and bytes of the fullest rank; before: the best without them. missing: where nothing fits,
    bytes that the nearest still lacks if its layers are cut and computed again in any way, by its linear model."""

    tried: search_stages.Tried
    found: tuple[Costed, ...]
    models: Mapping[Layout, tuple[float, float]]
    before: Costed | None
    missing: float | None


@dataclass(frozen=True)
class Found:
    """What a search says.

    best: the fastest that fits; second: the fastest of another shape (TP, PP, EP, ETP); pareto: the fastest under
    less and less memory, each slower and smaller than the one before. All are None or empty if nothing fits, and then
    nearest is the layout that needs least memory, with what its fullest rank needs. pruned: layouts that were not
    costed, by reason. work: passes of pipelines that were simulated, which is what a search mostly waits for.
    """

    card: ModelCard
    gpu: GPU
    world_size: int
    ceiling: int
    best: Costed | None
    second: Costed | None
    pareto: tuple[Costed, ...]
    nearest: Costed | None
    looked_at: int
    costed: int
    pruned: Mapping[str, int]
    programs: Programs | None
    bounds: Bounds = field(repr=False, compare=False)
    work: int = 0


_MEMORY = "too large"
_SLOWER = "slower than what was found, at best"


def search(
    config: TrainConfig,
    card: ModelCard,
    gpu: GPU,
    world_size: int,
    *,
    held: Collection[str] = (),
    imbalance: Imbalance | None = None,
    ceilings: Collection[float] = CEILINGS,
    runner_up: bool = True,
    refine: bool = True,
    refine_rows: bool = True,
    program: bool = True,
    overlap: bool = True,
    known: Bounds | None = None,
) -> Found:
    """The best layout of `config` on `world_size` GPUs: TP, PP, chunks and stages, EP, ETP, micro-batch, recomputation.

    held: dotted keys of these that stay as the job has them (`parallel.tensor_parallel_size`); CP always does (but see
    `search_context`).
    runner_up: whether the second is looked for. refine: if best or second compute whole layers again, then the fewest
    of each rank that fit (`search_recompute`), where that is a hundredth faster; refine_rows: those beneath, too.
    program: then stages of any sizes and recomputed layers one by one, by integer programs (`search_stages`), where
    their layouts are faster. overlap: then
    `moe.overlap_exchange`, for layouts that could gain most by it. known: of the same job on another number of GPUs
    (`Found.bounds`), whose layers' figures are then not made again.

    Raises UserError, in one line, if no layout is legal, and for more GPUs than `stages.MOST_GPUS`.
    """
    check_number(world_size)  # before all layouts of so many are listed
    costing = _Costing(config, card, gpu, world_size, imbalance or Imbalance())
    whole = gpu.usable_bytes
    space = Space(config, card, gpu, world_size, held)
    assert space.first is not None
    bounds = known or _bounds(costing, space.first)
    opened = Opened(space, bounds, whole)
    pruned = opened.pruned
    best, second = _fastest(costing, opened, whole, pruned, two=runner_up)
    second = second if runner_up else None  # what came by the way
    if refine and best is not None:
        refined = [_refined(costing, one, whole) for one in (best, second) if one is not None]
        best, second, *_ = *sorted(refined, key=lambda one: one.time.seconds), None
    programs = None
    if program:
        programs = _programs(costing, opened, best)
        best, second = _two([*(one for one in (best, second) if one is not None), *programs.found])
    if overlap and best is not None and not {"moe.overlap_exchange", "parallel.overlap_param_gather"} & set(held):
        beside = _overlapped(costing, opened, best)
        best, second = _two([one for one in (best, second, *beside) if one is not None])
    pareto = [] if best is None else [best]
    for share in sorted(ceilings, reverse=True) if best is not None else ():
        top, _ = _fastest(costing, opened, round(share * whole))
        top = _refined(costing, top, round(share * whole)) if refine_rows and top is not None else top
        if top is not None and top.memory.total < pareto[-1].memory.total:
            pareto.append(top)
    nearest = None
    if best is None:
        opened.count_illegal()
        nearest = _smallest(costing, opened)
        if programs is not None:
            programs = replace(programs, missing=_missing(costing, opened, nearest.layout))
    costed = 0 if best is None else sum(one.layout in costing.times for one in opened.every())
    if best is not None:
        pruned[_SLOWER] = space.number - sum(pruned.values()) - costed
    return Found(
        card,
        gpu,
        world_size,
        whole,
        best,
        second,
        tuple(pareto),
        nearest,
        space.number,
        costed,
        {reason: number for reason, number in pruned.items() if number},
        programs,
        bounds,
        sum(map(_passes, costing.times, costing.times.values())),
    )


def _passes(layout: Layout, time: StepTime) -> int:
    """About those that `plan.time` simulated, forward and backward: of many micro-batches only some groups."""
    return 2 * layout.pipeline * layout.chunks * min(time.micro_batches, 11 * layout.pipeline)


class _Costing:
    """Full plans of layouts, each made once."""

    def __init__(self, config: TrainConfig, card: ModelCard, gpu: GPU, world_size: int, imbalance: Imbalance) -> None:
        self.config, self.card, self.gpu, self.world_size, self.imbalance = config, card, gpu, world_size, imbalance
        self.profile = profile_of(gpu)
        self.every: dict[Layout, list[RankMemory]] = {}
        self.times: dict[Layout, StepTime] = {}

    def ranks(self, layout: Layout) -> list[RankMemory]:
        if layout not in self.every:
            config = layout.applied(self.config)
            ranks = memory.of_job(config, self.card, self.world_size, self.profile, imbalance=self.imbalance)
            self.every[layout] = ranks
        return self.every[layout]

    def memory(self, layout: Layout) -> RankMemory:
        return memory.tightest(self.ranks(layout))

    def full(self, layout: Layout) -> Costed:
        config = layout.applied(self.config)
        if layout not in self.times:
            self.times[layout] = estimate(config, self.card, self.gpu, self.world_size, imbalance=self.imbalance)
        where = place(config, self.card, self.world_size)
        return Costed(layout, config, where, self.memory(layout), self.times[layout])


def _bounds(costing: _Costing, first: Layout) -> Bounds:
    job = make_job(
        replace(first, recompute=search_space.Recompute()).applied(costing.config),
        costing.card,
        costing.gpu,
        costing.world_size,
        imbalance=costing.imbalance,
    )
    return Bounds(costing.config, costing.card, costing.gpu, job, costing.profile, costing.imbalance)


def _fastest(
    costing: _Costing, opened: Opened, ceiling: int, pruned: Counter[str] | None = None, *, two: bool = False
) -> tuple[Costed | None, Costed | None]:
    """The fastest that needs at most `ceiling` bytes, and, with `two`, the fastest of another shape."""
    best: Costed | None = None
    second: Costed | None = None
    for one in opened.fastest_first(ceiling):
        last = second if two else best
        if last is not None and one.seconds >= last.time.seconds:
            break
        if two and best is not None and one.layout.shape == best.layout.shape and one.seconds >= best.time.seconds:
            continue
        if costing.memory(one.layout).total > ceiling:
            if pruned is not None:
                pruned[_MEMORY] += 1
            continue
        this = costing.full(one.layout)
        if best is None or this.time.seconds < best.time.seconds:
            if best is not None and best.layout.shape != this.layout.shape:
                second = best
            best = this
        elif this.layout.shape != best.layout.shape and (second is None or this.time.seconds < second.time.seconds):
            second = this
    return best, second


def _refined(costing: _Costing, one: Costed, ceiling: int) -> Costed:
    """With as few layers computed again as fit below `ceiling` bytes, if that is worth the memory."""
    layout = fewest(one.layout, one.where, costing.card, ceiling, costing.ranks)
    if layout is None:
        return one
    fewer = costing.full(layout)
    return fewer if fewer.time.seconds < (1 - _WORTH) * one.time.seconds else one


def _shapes(opened: Opened, legal: list[Legal]) -> list[search_stages.Shape]:
    held, overlapped = "parallel.pipeline_layout" in opened.space.held, opened.space.config.moe.overlap_exchange
    return search_stages.shapes_to_try(legal, stages_held=held, overlapped=overlapped)


def _programs(costing: _Costing, opened: Opened, best: Costed | None) -> Programs:
    # all of them where nothing fits, so that it can be said how many are too large
    groups = opened.legal(None if best is None else costing.gpu.usable_bytes)
    tried = search_stages.improve(
        opened.bounds,
        ((seconds, _shapes(opened, legal)) for seconds, legal in groups),
        costing.gpu.usable_bytes,
        costing.ranks,
        float("inf") if best is None else best.time.seconds,
        lambda layout: costing.full(layout).time.pipeline_seconds,
        0.0 if best is None else best.time.seconds - best.time.pipeline_seconds,
    )
    found = tuple(costing.full(one.layout) for one in tried.fits)
    models = {one.layout: (one.model_seconds, one.model_bytes) for one in tried.fits}
    return Programs(tried, found, models, best, None)


def _missing(costing: _Costing, opened: Opened, nearest: Layout) -> float | None:
    """Bytes that the nearest lacks with its layers cut and computed again in any way; None if no such cut is legal."""
    some = [
        search_stages.least_missing(opened.bounds, shape, costing.gpu.usable_bytes, costing.ranks)
        for _, legal in opened.legal(None)
        if legal and legal[0][0].shape == nearest.shape and legal[0][0].micro_batch == nearest.micro_batch
        for shape in _shapes(opened, legal)
        if shape.is_of(nearest)
    ]
    return min((one for one in some if one is not None), default=None)


def _overlapped(costing: _Costing, opened: Opened, best: Costed) -> list[Costed]:
    """The layouts of the least bounds, with overlap, that fit."""
    config = costing.config
    if config.moe.overlap_exchange:
        return []
    moe = config.moe.model_copy(update={"overlap_exchange": True})
    parallel = config.parallel.model_copy(update={"overlap_param_gather": False})
    own = config.model_copy(update={"moe": moe, "parallel": parallel})
    job = replace(opened.bounds.job, config=own)
    beside = Bounds(own, costing.card, costing.gpu, job, costing.profile, costing.imbalance)
    whole = costing.gpu.usable_bytes
    some = ((one.seconds, one.layout) for one in opened.fastest_first(whole))
    out: list[Costed] = []
    seconds = best.time.seconds
    for least, layout in sorted(
        search_overlap.overlapped(beside, some, seconds, whole, costing.world_size), key=lambda one: one[0]
    )[:_OVERLAPPED]:
        if least < seconds and costing.memory(layout).total <= whole:
            out.append(costing.full(layout))
            seconds = min(seconds, out[-1].time.seconds)
    return out


def _two(costed: list[Costed]) -> tuple[Costed | None, Costed | None]:
    """The fastest, and the fastest of another shape. What comes first in the list is taken of two alike."""
    best = min(costed, key=lambda one: one.time.seconds, default=None)
    others = [one for one in costed if best is not None and one.layout.shape != best.layout.shape]
    return best, min(others, key=lambda one: one.time.seconds, default=None)


def _smallest(costing: _Costing, opened: Opened) -> Costed:
    """The layout that needs least memory."""
    best: Layout | None = None
    for one in opened.smallest_first():
        if best is not None and one.memory >= costing.memory(best).total:
            break
        if best is None or costing.memory(one.layout).total < costing.memory(best).total:
            best = one.layout
    assert best is not None
    return costing.full(best)

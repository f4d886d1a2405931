"""The fastest layout of a job that fits its GPUs: every legal one is bounded, and only those are costed that could win.

`search_bounds` says at once what a layout needs at least. Layouts whose bound of memory is over the ceiling are left
out; the others are costed in full, best bound of time first, until no bound is better than what was found. What is
left out cannot be better: the answer is that of costing them all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.hardware.card import GPU
from maniple.models.card import ModelCard
from maniple.plan import memory, search_overlap, search_space, search_stages
from maniple.plan.imbalance import Imbalance
from maniple.plan.memory import RankMemory
from maniple.plan.profile import profile_of
from maniple.plan.search_bounds import Bounds
from maniple.plan.search_recompute import fewest
from maniple.plan.search_space import Layout
from maniple.plan.stages import Placement, place
from maniple.plan.time import StepTime, estimate, make_job

# shares of a GPU's memory below which the best layout is looked for too
CEILINGS = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)

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

    best: the fastest that fits; second: the fastest of another shape (TP, PP, EP); pareto: the fastest under
    less and less memory, each slower and smaller than the one before. All are None or empty if nothing fits, and then
    nearest is the layout that needs least memory, with what its fullest rank needs. pruned: layouts that were not
    costed, by reason.
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


@dataclass(frozen=True)
class _Bounded:
    seconds: float
    memory: int
    layout: Layout


ILLEGAL = "not legal"
_STATES = "too large by parameters and optimizer alone"
_KEPT = "too large by what layers keep for backward"
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
    refine: bool = True,
    program: bool = True,
    overlap: bool = True,
) -> Found:
    """The best layout of `config` on `world_size` GPUs: TP, PP, chunks and stages, EP, micro-batch, recomputation.

    held: dotted keys of these that stay as the job has them (`parallel.tensor_parallel_size`); CP (but see
    `search_context`) and ETP always do.
    refine: if best or second compute whole layers again, then the fewest of each rank that fit (`search_recompute`),
    where that is a hundredth faster. program: then stages of any sizes and recomputed layers one by one, by integer
    programs (`search_stages`), where their layouts are faster. overlap: then `moe.overlap_exchange`, for layouts that
    could gain most by it. Raises UserError, in one line, if no layout is legal.
    """
    costing = _Costing(config, card, gpu, world_size, imbalance or Imbalance())
    whole = gpu.memory_bytes
    pruned: Counter[str] = Counter()
    legal = legal_layouts(config, card, gpu, world_size, held, pruned)
    bounds = _bounds(costing, legal[0][0])
    every, smallest = _bounded(bounds, legal, whole, pruned)
    looked_at = len(every) + sum(pruned.values())
    every.sort(key=lambda one: one.seconds)
    best, second = _fastest(costing, every, whole, pruned, two=True)
    if refine and best is not None:
        refined = [_refined(costing, one) for one in (best, second) if one is not None]
        best, second, *_ = *sorted(refined, key=lambda one: one.time.seconds), None
    programs = None
    if program:
        stages_held, overlapped = "parallel.pipeline_layout" in held, config.moe.overlap_exchange
        shapes = search_stages.shapes_to_try(legal, stages_held=stages_held, overlapped=overlapped)
        programs = _programs(costing, bounds, shapes, best)
        best, second = _two([*(one for one in (best, second) if one is not None), *programs.found])
    if overlap and best is not None and not {"moe.overlap_exchange", "parallel.overlap_param_gather"} & set(held):
        beside = _overlapped(costing, bounds, every, best)
        best, second = _two([one for one in (best, second, *beside) if one is not None])
    pareto = [] if best is None else [best]
    for share in sorted(ceilings, reverse=True) if best is not None else ():
        top, _ = _fastest(costing, every, round(share * whole))
        if top is not None and top.memory.total < pareto[-1].memory.total:
            pareto.append(top)
    nearest = _smallest(costing, every, smallest) if best is None else None
    if nearest is not None and programs is not None:
        alike = [shape for shape in shapes if shape.is_of(nearest.layout)]
        some = [search_stages.least_missing(bounds, shape, whole, costing.ranks) for shape in alike]
        programs = replace(programs, missing=min((one for one in some if one is not None), default=None))
    costed = 0 if best is None else sum(one.layout in costing.times for one in every)
    if best is not None:
        pruned[_SLOWER] = looked_at - sum(pruned.values()) - costed
    return Found(
        card,
        gpu,
        world_size,
        whole,
        best,
        second,
        tuple(pareto),
        nearest,
        looked_at,
        costed,
        {reason: number for reason, number in pruned.items() if number},
        programs,
    )


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


# a layout, where its layers are, and what it can compute again
Legal = tuple[Layout, Placement, list[search_space.Recompute | None]]


def legal_layouts(
    config: TrainConfig, card: ModelCard, gpu: GPU, world_size: int, held: Collection[str], refused: Counter[str]
) -> list[Legal]:
    """Each with where its layers are and what it can compute again; counts those that `config.check` refuses."""
    out = []
    reason = ""
    for tensor, pipeline, chunks, stages, expert in search_space.shapes_of(config, card, gpu, world_size, held):
        for size in search_space.micro_batches(config, held):
            layout = Layout(tensor, pipeline, chunks, stages, expert, size, None)
            plain = replace(layout, recompute=search_space.Recompute())
            kinds = search_space.recomputes(config, -(-card.num_layers // (pipeline * chunks)), held)
            try:
                where = place((layout if kinds == [None] else plain).applied(config), card, world_size)
            except UserError as error:
                reason = str(error)
                refused[ILLEGAL] += len(kinds)
                continue
            if config.moe.overlap_exchange and where.micro_batches == 1:
                refused[ILLEGAL] += len(kinds)  # there is no other micro-batch whose work would hide the exchange
                reason = "moe.overlap_exchange needs a second micro-batch"
                continue
            out.append((layout, where, kinds))
    if not out:
        place(config, card, world_size)  # says what is wrong with the job itself, if anything is
        raise UserError(f"no layout of {card.name} on {world_size:,} GPUs is legal: {reason}")
    return out


def _bounds(costing: _Costing, first: Layout) -> Bounds:
    job = make_job(
        replace(first, recompute=search_space.Recompute()).applied(costing.config),
        costing.card,
        costing.gpu,
        costing.world_size,
        imbalance=costing.imbalance,
    )
    return Bounds(costing.config, costing.card, costing.gpu, job, costing.profile, costing.imbalance)


def _bounded(
    bounds: Bounds, legal: list[Legal], ceiling: int, pruned: Counter[str]
) -> tuple[list[_Bounded], list[_Bounded]]:
    """Legal layouts that could fit, with their bounds, and those that need least, should nothing fit; counts in
    `pruned` how many were left out and why."""
    out: list[_Bounded] = []
    smallest: list[_Bounded] = []
    for layout, where, kinds in legal:
        if max(bounds.states(layout, where)) > ceiling:
            pruned[_STATES] += len(kinds)
            last = replace(layout, recompute=kinds[-1])
            smallest.append(_Bounded(0.0, bounds.memory(last, where), last))
            continue
        for kind in kinds:
            one = replace(layout, recompute=kind)
            size = bounds.memory(one, where)
            if size > ceiling:
                pruned[_KEPT] += 1
                smallest.append(_Bounded(0.0, size, one))
            else:
                out.append(_Bounded(bounds.seconds(one, where), size, one))
    return out, smallest


def _fastest(
    costing: _Costing, every: list[_Bounded], ceiling: int, pruned: Counter[str] | None = None, *, two: bool = False
) -> tuple[Costed | None, Costed | None]:
    """The fastest that needs at most `ceiling` bytes, and, with `two`, the fastest of another shape."""
    best: Costed | None = None
    second: Costed | None = None
    for one in every:
        last = second if two else best
        if last is not None and one.seconds >= last.time.seconds:
            break
        if two and best is not None and one.layout.shape == best.layout.shape and one.seconds >= best.time.seconds:
            continue
        if one.memory > ceiling:
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


def _refined(costing: _Costing, one: Costed) -> Costed:
    """With as few layers computed again as fit, if that is worth the memory."""
    layout = fewest(one.layout, one.where, costing.card, costing.gpu.memory_bytes, costing.ranks)
    if layout is None:
        return one
    fewer = costing.full(layout)
    return fewer if fewer.time.seconds < (1 - _WORTH) * one.time.seconds else one


def _programs(costing: _Costing, bounds: Bounds, shapes: list[search_stages.Shape], best: Costed | None) -> Programs:
    tried = search_stages.improve(
        bounds,
        shapes,
        costing.gpu.memory_bytes,
        costing.ranks,
        float("inf") if best is None else best.time.seconds,
        lambda layout: costing.full(layout).time.pipeline_seconds,
        0.0 if best is None else best.time.seconds - best.time.pipeline_seconds,
    )
    found = tuple(costing.full(one.layout) for one in tried.fits)
    models = {one.layout: (one.model_seconds, one.model_bytes) for one in tried.fits}
    return Programs(tried, found, models, best, None)


def _overlapped(costing: _Costing, bounds: Bounds, every: list[_Bounded], best: Costed) -> list[Costed]:
    """The layouts of the least bounds, with overlap, that fit."""
    config = costing.config
    if config.moe.overlap_exchange:
        return []
    moe = config.moe.model_copy(update={"overlap_exchange": True})
    parallel = config.parallel.model_copy(update={"overlap_param_gather": False})
    own = config.model_copy(update={"moe": moe, "parallel": parallel})
    beside = Bounds(own, costing.card, costing.gpu, replace(bounds.job, config=own), costing.profile, costing.imbalance)
    some = ((one.seconds, one.layout) for one in every)
    whole = costing.gpu.memory_bytes
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


def _smallest(costing: _Costing, every: list[_Bounded], pruned: list[_Bounded]) -> Costed | None:
    """The layout that needs least memory."""
    best: Layout | None = None
    for one in sorted([*every, *pruned], key=lambda one: one.memory):
        if best is not None and one.memory >= costing.memory(best).total:
            break
        if best is None or costing.memory(one.layout).total < costing.memory(best).total:
            best = one.layout
    return None if best is None else costing.full(best)

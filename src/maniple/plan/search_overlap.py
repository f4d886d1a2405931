"""Layouts in which one micro-batch's exchange runs beside another's backward pass (`moe.overlap_exchange`), of those
that could then be the fastest.

What overlap saves is at most the share of the exchange that the software hides, so that few layouts come into question:
those that without it are no slower than that. It takes a second model chunk in a pipeline, a second micro-batch, layers
that are not computed again whole, and parameters that are gathered before the step's first pass, not under it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.models.card import ModelCard
from maniple.plan.search_bounds import Bounds
from maniple.plan.search_space import Layout
from maniple.plan.stages import Placement, place


def overlapped(
    bounds: Bounds, every: Iterable[tuple[float, Layout]], best: float, ceiling: int, world_size: int
) -> Iterator[tuple[float, Layout]]:
    """(bound of its seconds, layout with overlap) of those that could take less than `best` seconds and fit.

    bounds: of the job with overlap. every: bounds of seconds and layouts without, in order.
    """
    hidden = bounds.job.software.hidden
    for seconds, layout in every:
        if (1 - hidden) * seconds >= best:
            return
        kind = bounds.kind(layout)
        if layout.expert == 1 or (layout.pipeline > 1 and layout.chunks == 1) or kind.granularity == "full":
            continue
        other = replace(layout, overlap=True)
        where = _placed(bounds.config, bounds.card, other, world_size)
        if where is None or where.micro_batches == 1 or bounds.memory(other, where) > ceiling:
            continue
        least = bounds.seconds(other, where)
        if least < best:
            yield least, other


def _placed(config: TrainConfig, card: ModelCard, layout: Layout, world_size: int) -> Placement | None:
    try:
        return place(layout.applied(config), card, world_size)
    except UserError:  # MTP of more than one layer, documents kept apart, ...: the engine's limits
        return None

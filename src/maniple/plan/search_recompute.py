"""The fewest layers that each pipeline rank has to compute again so that a layout fits.

Ranks hold fewer micro-batches the later they come in the pipeline, and need less of it. What a rank saves grows with
every layer on its list, and its bytes depend on no other rank's list: so the least number is found by halving, for all
ranks at once. Layers of a rank's first chunks, which wait longest for their backward passes, come first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from maniple.models.card import ModelCard
from maniple.plan.memory import RankMemory
from maniple.plan.search_space import Layout, Recompute
from maniple.plan.stages import Placement


def fewest(
    layout: Layout, where: Placement, card: ModelCard, ceiling: int, ranks_of: Callable[[Layout], Sequence[RankMemory]]
) -> Layout | None:
    """`layout` with `recompute.layers` as few as fit below `ceiling` bytes; None where it computes no whole layers
    again, where all of them are too few, or where none are needed.

    ranks_of: what each pipeline rank of a layout needs.
    """
    if layout.recompute is None or layout.recompute.granularity != "full":
        return None
    lists = [
        [
            number
            for stage in where.of_rank(rank)
            for number in (*stage.layers, *(card.num_layers + depth for depth in stage.mtp))
        ]
        for rank in range(where.pipeline)
    ]

    def with_counts(counts: Sequence[int]) -> Layout:
        chosen = sorted(number for numbers, count in zip(lists, counts, strict=True) for number in numbers[:count])
        return replace(layout, recompute=Recompute("full", None, (), tuple(chosen)))

    least, most = [0] * len(lists), [len(numbers) for numbers in lists]
    if any(rank.total > ceiling for rank in ranks_of(with_counts(most))):
        return None
    while least != most:
        middle = [(low + high) // 2 for low, high in zip(least, most, strict=True)]
        if not any(middle):  # an empty list would mean every layer
            middle[next(rank for rank in range(len(lists)) if least[rank] < most[rank])] += 1
        needs = ranks_of(with_counts(middle))
        for rank, count in enumerate(middle):
            if needs[rank].total <= ceiling:
                most[rank] = min(most[rank], count)
            else:
                least[rank] = count + 1
        if sum(most) == 1 and not sum(least):
            break
    return with_counts(most) if any(most) else None

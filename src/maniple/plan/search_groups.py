"""Layouts of a search in groups of the same TP, PP, EP, ETP and micro-batch, opened only where one of them could count.

Layouts of a group differ in how layers are cut into stages and in what is computed again. However that is, the pipeline
does at least the model's work, and its ranks hold at least the model's states: so a group has bounds at once, of
seconds and of bytes, that all of its layouts keep (`Bounds.of_all_cuts`). Most groups are never opened, such as those
whose exchanges alone take longer than a step that was found: by far most of those with ETP.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from maniple.config.check import check_sizes
from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.hardware.card import GPU
from maniple.models.card import ModelCard
from maniple.plan import search_space
from maniple.plan.search_bounds import Bounds
from maniple.plan.search_space import Cuts, Layout, Recompute, Shape
from maniple.plan.stages import Placement, Stage, place

ILLEGAL = "not legal"
STATES = "too large by parameters and optimizer alone"
KEPT = "too large by what layers keep for backward"

# a layout, where its layers are, and what it can compute again
Legal = tuple[Layout, Placement, list[Recompute | None]]


@dataclass(frozen=True, eq=False)
class Group:
    """where: the sizes of its ranks' groups, and one stage that holds the whole model. number: of its layouts."""

    shape: Shape
    micro_batch: int
    cuts: Cuts
    number: int
    where: Placement

    @property
    def layout(self) -> Layout:
        """One of them, without recomputation; as if layers divided evenly."""
        tensor, pipeline, expert, expert_tensor = self.shape
        return Layout(tensor, pipeline, 1, None, expert, expert_tensor, self.micro_batch)


@dataclass(frozen=True)
class Bounded:
    """A layout with its bounds: seconds of a step (infinite where it cannot fit), bytes of its fullest rank."""

    seconds: float
    memory: int
    layout: Layout


class Space:
    """All layouts of a job on so many GPUs. Raises UserError, in one line, if none is legal.

    refused: how many belong to groups of which none is legal; first: one that is.
    """

    def __init__(
        self, config: TrainConfig, card: ModelCard, gpu: GPU, world_size: int, held: Collection[str] = ()
    ) -> None:
        self.config, self.card, self.world_size, self.held = config, card, world_size, held
        self.groups: list[Group] = []
        self.refused = 0
        self._legal: dict[Group, tuple[list[Legal], int]] = {}
        self._reason = ""
        self._kinds: dict[int, list[Recompute | None]] = {}
        self._sizes: dict[tuple[int, ...], bool] = {}
        for shape, cuts in search_space.shapes_of(config, card, gpu, world_size, held):
            for micro_batch in search_space.micro_batches(config, held):
                self._add(shape, micro_batch, cuts)
        self.first = next((legal[0][0] for group in self.groups if (legal := self.legal(group)[0])), None)
        if self.first is None:
            place(config, card, world_size)  # says what is wrong with the job itself, if anything is
            raise UserError(f"no layout of {card.name} on {world_size:,} GPUs is legal: {self._reason}")

    @property
    def number(self) -> int:
        """Of layouts, legal or not."""
        return self.refused + sum(group.number for group in self.groups)

    def _add(self, shape: Shape, micro_batch: int, cuts: Cuts) -> None:
        tensor, pipeline, expert, expert_tensor = shape
        number = sum(len(self._kinds_of(pipeline * chunks)) for chunks, _ in cuts)
        if not number:
            return
        context = self.config.parallel.context_parallel_size
        data, rest = divmod(self.world_size, tensor * pipeline * context)
        replicas, other = divmod(self.world_size, expert * expert_tensor * pipeline)
        batch = self.config.train.global_batch_size
        whole = Stage(0, 0, tuple(range(self.card.num_layers)), True, True, tuple(range(self.card.num_mtp_layers)))
        if rest or other or batch % (data * micro_batch):
            self._refuse(shape, micro_batch, cuts, number)
            return
        where = Placement(
            *(self.world_size, tensor, pipeline, 1, context, data, expert, expert_tensor, replicas),
            micro_batches=batch // (data * micro_batch),
            stages=(whole,),
        )
        group = Group(shape, micro_batch, cuts, number, where)
        if self._fits_model(group):
            self.groups.append(group)
        else:
            self._refuse(shape, micro_batch, cuts, number)

    def _fits_model(self, group: Group) -> bool:
        tensor, _, *experts = group.shape
        key = tensor, *experts
        if key not in self._sizes:
            try:
                check_sizes(group.layout.applied(self.config), self.card)
                self._sizes[key] = True
            except UserError:
                self._sizes[key] = False
        return self._sizes[key]

    def _refuse(self, shape: Shape, micro_batch: int, cuts: Cuts, number: int) -> None:
        self.refused += number
        if not self._reason and not self.groups:
            self._legal_of(shape, micro_batch, cuts[:1])  # for its reason

    def _kinds_of(self, stages: int) -> list[Recompute | None]:
        layers = -(-self.card.num_layers // stages)
        if layers not in self._kinds:
            self._kinds[layers] = search_space.recomputes(self.config, layers, self.held)
        return self._kinds[layers]

    def legal(self, group: Group) -> tuple[list[Legal], int]:
        """(Layouts that `config.check` takes, how many of the group it does not)."""
        if group not in self._legal:
            self._legal[group] = self._legal_of(group.shape, group.micro_batch, group.cuts)
        return self._legal[group]

    def _legal_of(self, shape: Shape, micro_batch: int, cuts: Cuts) -> tuple[list[Legal], int]:
        out: list[Legal] = []
        refused = 0
        tensor, pipeline, expert, expert_tensor = shape
        for chunks, stages in cuts:
            layout = Layout(tensor, pipeline, chunks, stages, expert, expert_tensor, micro_batch, None)
            kinds = self._kinds_of(pipeline * chunks)
            plain = layout if kinds == [None] else replace(layout, recompute=Recompute())
            try:
                where = place(plain.applied(self.config), self.card, self.world_size)
            except UserError as error:
                self._reason = str(error)
                refused += len(kinds)
                continue
            if self.config.moe.overlap_exchange and where.micro_batches == 1:
                # there is no other micro-batch whose work would hide the exchange
                self._reason = "moe.overlap_exchange needs a second micro-batch"
                refused += len(kinds)
                continue
            out.append((layout, where, kinds))
        return out, refused


class Opened:
    """Groups of a space by their bounds, and those opened in which something was looked for.

    pruned: layouts left out so far, by reason.
    """

    def __init__(self, space: Space, bounds: Bounds, ceiling: int) -> None:
        self.space, self.bounds, self.ceiling = space, bounds, ceiling
        self.pruned: Counter[str] = Counter({ILLEGAL: space.refused})
        both = [(*bounds.of_all_cuts(group.layout, group.where), group) for group in space.groups]
        self._groups = sorted(both, key=lambda one: one[0])
        self._layouts: dict[Group, list[Bounded]] = {}
        self.pruned[STATES] = sum(group.number for _, memory, group in both if memory > ceiling)

    def fastest_first(self, ceiling: int) -> Iterator[Bounded]:
        """Layouts that could need at most `ceiling` bytes, which fit the GPU, by their bounds of seconds."""
        return self._merged(self._groups, ceiling, lambda one: one.seconds)

    def smallest_first(self) -> Iterator[Bounded]:
        """All layouts, by their bounds of bytes."""
        groups = sorted(((float(size), size, group) for _, size, group in self._groups), key=lambda one: one[0])
        return self._merged(groups, None, lambda one: one.memory)

    def legal(self, ceiling: int | None) -> Iterator[tuple[float, list[Legal]]]:
        """(A bound of their seconds, legal layouts) of each group that could fit, best bound first."""
        for seconds, memory, group in self._groups:
            if ceiling is None or memory <= ceiling:
                yield seconds, self.space.legal(group)[0]

    def every(self) -> Iterator[Bounded]:
        """Of the groups that are open, layouts that could fit."""
        return (one for group in self._layouts.values() for one in group if one.seconds < float("inf"))

    def count_illegal(self) -> None:
        """Also in groups that are too large."""
        for _, memory, group in self._groups:
            if memory > self.ceiling:
                refused = self.space.legal(group)[1]
                self.pruned[ILLEGAL] += refused
                self.pruned[STATES] -= refused

    def _merged(
        self, groups: list[tuple[float, int, Group]], ceiling: int | None, key: Callable[[Bounded], float]
    ) -> Iterator[Bounded]:
        heap: list[tuple[float, int, Bounded]] = []
        number = 0
        for least, memory, group in groups:
            while heap and heap[0][0] <= least:
                yield heapq.heappop(heap)[2]
            if ceiling is not None and memory > ceiling:
                continue
            for one in self._open(group, memory > self.ceiling):
                if ceiling is None or one.memory <= ceiling:
                    number += 1
                    heapq.heappush(heap, (key(one), number, one))
        while heap:
            yield heapq.heappop(heap)[2]

    def _open(self, group: Group, too_large: bool) -> list[Bounded]:
        if group in self._layouts:
            return self._layouts[group]
        out: list[Bounded] = []
        legal, refused = self.space.legal(group)
        counts: Counter[str] = Counter({ILLEGAL: refused})
        for layout, where, kinds in legal:
            why = STATES if max(self.bounds.states(layout, where)) > self.ceiling else KEPT
            for kind in kinds:
                one = replace(layout, recompute=kind)
                size = self.bounds.memory(one, where)
                if size > self.ceiling:
                    counts[why] += 1
                    out.append(Bounded(float("inf"), size, one))
                else:
                    out.append(Bounded(self.bounds.seconds(one, where), size, one))
        if not too_large:  # else it is counted already
            self.pruned.update(counts)
        self._layouts[group] = out
        return out

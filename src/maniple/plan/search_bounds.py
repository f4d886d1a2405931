"""What a layout needs at least: bytes of its fullest rank and seconds of a step. Both are below what `memory.of_job`
and `time.estimate` say, close to it, and cost far less.

Time: a rank begins when the stages before its first have run once, works through all micro-batches, and the stages
before it run backward once more. With one chunk a rank, its first backward pass waits for the first micro-batch to go
to the end and back, and by then p - r forward passes have run. Then the first rank's gradients, the optimizer, the
parameters. Memory: the states,
and what layers keep for backward when the rank's first backward pass begins.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from maniple.config.schema import TrainConfig
from maniple.hardware.card import GPU
from maniple.models.card import ModelCard
from maniple.plan import memory, memory_layers, parameters
from maniple.plan.imbalance import Imbalance
from maniple.plan.memory_chunks import Layers
from maniple.plan.profile import Profile
from maniple.plan.search_space import Layout, Recompute
from maniple.plan.shapes import shapes
from maniple.plan.simulator import StageCost
from maniple.plan.stage_time import Job, stage_time
from maniple.plan.stages import Placement, Stage
from maniple.plan.time import data_parallel

_ROUNDED = 8
_BELOW = 1 - 1e-9  # sums in another order end in other digits


@dataclass(frozen=True)
class _Sums:
    """Sums over the layers before each: entry `b` less entry `a` is of layers a to b - 1."""

    forward: list[float]
    backward: list[float]
    exchange: list[float]
    kept: list[int]

    @classmethod
    def of(cls, costs: Sequence[StageCost], kept: Sequence[int]) -> _Sums:
        def summed(values):
            return list(itertools.accumulate(values, initial=0))

        return cls(
            summed(cost.forward for cost in costs),
            summed(cost.backward + cost.weight for cost in costs),
            summed(cost.exchange_forward + cost.exchange_backward for cost in costs),
            summed(kept),
        )


class Bounds:
    """Bounds for all layouts of a job on one kind of GPU; what layouts share is computed once."""

    def __init__(
        self, config: TrainConfig, card: ModelCard, gpu: GPU, job: Job, profile: Profile, imbalance: Imbalance
    ) -> None:
        self.config, self.card, self.gpu, self.job = config, card, gpu, job
        self.profile, self.imbalance = profile, imbalance
        self._sums: dict[tuple, tuple[_Sums, _Sums]] = {}
        self._ends: dict[tuple, StageCost] = {}
        self._counts: dict[tuple, parameters.RankParameters] = {}
        self._caches: dict[tuple, dict] = {}
        self._states: dict[tuple, tuple[list[parameters.RankParameters], list[int]]] = {}
        self._configs: dict[int, TrainConfig] = {}
        self._layers: dict[tuple, list[tuple[StageCost, int]]] = {}

    def states(self, layout: Layout, where: Placement) -> list[int]:
        """Bytes of each pipeline rank's states, with what the device takes before any tensor."""
        return self._of_ranks(layout, where)[1]

    def _of_ranks(self, layout: Layout, where: Placement) -> tuple[list[parameters.RankParameters], list[int]]:
        key = (*layout.shape, layout.stages, layout.chunks, where.world_size)
        if key not in self._states:
            config = layout.applied(self.config)
            counts = [parameters.of_rank(config, self.card, where, rank) for rank in range(where.pipeline)]
            sizes = [sum(memory.states_of(config, where, count).values()) for count in counts]
            self._states[key] = counts, [round(self._on_device(size)) for size in sizes]
        return self._states[key]

    def of_all_cuts(self, layout: Layout, where: Placement) -> tuple[float, int]:
        """(seconds, bytes) that all layouts alike but for chunks, stages and recomputation take and need at least: work
        and states as if dealt evenly to the pipeline's ranks, of which the one that has most has the mean at least.

        where: one stage, which holds the whole model.
        """
        (stage,) = where.stages
        hidden = self.job.software.hidden if self.config.moe.overlap_exchange else 0.0
        costs = [cost for cost, _ in self.layers(layout, where, Recompute())]
        costs.append(self.end_cost(layout, where, stage))
        work = sum(
            cost.forward + cost.backward + cost.weight - hidden * (cost.exchange_forward + cost.exchange_backward)
            for cost in costs
        )
        config = layout.applied(self.config)
        if layout.shape not in self._counts:
            self._counts[layout.shape] = parameters.of_stage(config, self.card, where, stage)
        count = self._counts[layout.shape]
        # less a few bytes: sizes of ranks are rounded, each for itself
        states = sum(memory.states_of(config, where, count).values()) / where.pipeline - _ROUNDED
        return where.micro_batches * work / where.pipeline * _BELOW, int(self._on_device(states))

    def _on_device(self, tensors: float) -> float:
        return (tensors + self.profile.workspace) * (1 + self.profile.slack) + self.profile.context

    def memory(self, layout: Layout, where: Placement) -> int:
        """Bytes that the fullest rank needs at least, its layers' activations among them."""
        whole, none = self._units(layout, where)
        full = self._recomputed_of(layout)
        states = self.states(layout, where)
        most = 0
        for rank in {0, max(range(where.pipeline), key=states.__getitem__)}:
            passes = _first_passes(where, rank)
            kept = 0
            for stage, times in zip(where.of_rank(rank), passes, strict=True):
                if stage.layers:
                    first, end = stage.layers[0], stage.layers[-1] + 1
                    cut = min(end, first + full)
                    kept += times * (whole.kept[cut] - whole.kept[first] + none.kept[end] - none.kept[cut])
            most = max(most, states[rank] + round(kept * (1 + self.profile.slack)))
        return most

    def seconds(self, layout: Layout, where: Placement) -> float:
        """Seconds that a step takes at least."""
        whole, none = self._units(layout, where)
        full = self._recomputed_of(layout)
        overlapped = self.config.moe.overlap_exchange
        hidden = self.job.software.hidden if overlapped else 0.0
        forward, backward = [], []
        for stage in where.stages:
            ahead = back = 0.0
            if stage.layers:
                first, end = stage.layers[0], stage.layers[-1] + 1
                cut = min(end, first + full)
                ahead = none.forward[end] - none.forward[first]
                back = whole.backward[cut] - whole.backward[first] + none.backward[end] - none.backward[cut]
                back -= hidden * (none.exchange[end] - none.exchange[first])
            if stage.embedding or stage.head or stage.mtp:
                cost = self.end_cost(layout, where, stage)
                ahead += cost.forward
                back += cost.backward + cost.weight - hidden * (cost.exchange_forward + cost.exchange_backward)
            forward.append(ahead)
            backward.append(back)
        job = self._job(layout, where)
        send = job.network.send_seconds(job.boundary_bytes, where.world_size // where.pipeline, where.world_size)
        pipeline = before = 0.0
        around = sum(forward) + sum(backward) + 2 * (where.pipeline - 1) * send
        for rank in range(where.pipeline):
            busy = sum(forward[rank :: where.pipeline]) + sum(backward[rank :: where.pipeline])
            pipeline = max(pipeline, before + where.micro_batches * busy)
            before += forward[rank] + backward[rank] + (0.0 if overlapped else 2 * send)
            if where.chunks == 1 and not overlapped:
                rest = where.micro_batches - min(where.micro_batches, where.pipeline - rank)
                sends = ((rank > 0) + (rank < where.pipeline - 1)) * send
                mine = (where.micro_batches - 1) * backward[rank] + rest * (forward[rank] + sends)
                pipeline = max(pipeline, around + mine)
        counts, states = self._of_ranks(layout, where)
        ends_of = []
        for rank in {0, max(range(where.pipeline), key=states.__getitem__)}:
            stages = [
                StageCost(forward[index], backward[index]) for index in range(rank, len(where.stages), where.pipeline)
            ]
            dense, experts = sum(counts[rank].dense.values()), sum(counts[rank].experts.values())
            reduce, gather, update = data_parallel(job, dense, experts, stages)
            # the first rank's last backward pass is the last of all
            ends_of.append((reduce if rank == 0 and not hidden else 0.0, gather if not hidden else 0.0, update))
        return pipeline + sum(max(column) for column in zip(*ends_of, strict=True))

    def _job(self, layout: Layout, where: Placement) -> Job:
        """Of the layout's sizes and place; all else is the job's own."""
        if layout.micro_batch not in self._configs:
            train = self.config.train.model_copy(update={"micro_batch_size": layout.micro_batch})
            self._configs[layout.micro_batch] = self.config.model_copy(update={"train": train})
        return replace(self.job, config=self._configs[layout.micro_batch], place=where)

    def send_seconds(self, layout: Layout, where: Placement) -> float:
        """Of a message from a stage to the next."""
        job = self._job(layout, where)
        return job.network.send_seconds(job.boundary_bytes, where.world_size // where.pipeline, where.world_size)

    def _recomputed_of(self, layout: Layout) -> int:
        """How many layers of a chunk, from its first, are computed again whole."""
        kind = self.kind(layout)
        if kind.granularity != "full":
            return 0
        return self.card.num_layers if kind.num_layers is None else kind.num_layers

    def kind(self, layout: Layout) -> Recompute:
        own = self.config.recompute
        return layout.recompute or Recompute(own.granularity, own.num_layers, tuple(own.modules))

    def end_cost(self, layout: Layout, where: Placement, stage: Stage) -> StageCost:
        """Of a stage's embedding, head and MTP layers, which no job recomputes here: a bound."""
        alone = Stage(0, 0, (), stage.embedding, stage.head, stage.mtp)
        key = _sizes(layout), alone
        if key not in self._ends:
            self._ends[key] = self._cost(layout, where, Recompute(), alone)
        return self._ends[key]

    def _units(self, layout: Layout, where: Placement) -> tuple[_Sums, _Sums]:
        """Layers recomputed whole, and layers that are not (but for modules), by sums."""
        modules = self.kind(layout).modules
        own = self.config.recompute.layers if layout.recompute is None else []
        key = _sizes(layout), modules
        if key not in self._sums:
            selective = Recompute("selective", None, modules) if modules else Recompute()
            full, none = self.layers(layout, where, Recompute("full")), self.layers(layout, where, selective)
            if own:  # the job's own list of layers
                none = [full[layer] if layer in own else none[layer] for layer in range(self.card.num_layers)]
                full = none
            self._sums[key] = (
                _Sums.of([cost for cost, _ in full], [kept for _, kept in full]),
                _Sums.of([cost for cost, _ in none], [kept for _, kept in none]),
            )
        return self._sums[key]

    def layers(self, layout: Layout, where: Placement, kind: Recompute) -> list[tuple[StageCost, int]]:
        """(cost, bytes kept for backward) of each decoder layer, if all are computed again as `kind` says."""
        key = _sizes(layout), kind
        if key not in self._layers:
            self._layers[key] = self._each_layer(layout, where, kind)
        return self._layers[key]

    def _each_layer(self, layout: Layout, where: Placement, kind: Recompute) -> list[tuple[StageCost, int]]:
        config = replace(layout, recompute=kind).applied(self.config)
        load = self.imbalance.factor(self.card.moe.num_experts, where.expert)
        layers = Layers(config, self.card, shapes(config, self.card, where, load=load), self.profile)
        known: dict[tuple, tuple[StageCost, int]] = {}
        out = []
        for layer in range(self.card.num_layers):
            alike = (
                self.card.is_moe_layer(layer),
                self.card.window(layer),
                config.precision.recipe_of(layer, self.card.num_layers),
            )
            if alike not in known:
                held = layers.held(layer)
                kept = (memory_layers.recomputed(held) if kind.granularity == "full" else held).kept_bytes
                known[alike] = self._cost(layout, where, kind, Stage(0, 0, (layer,), False, False)), kept
            out.append(known[alike])
        return out

    def _cost(self, layout: Layout, where: Placement, kind: Recompute, stage: Stage) -> StageCost:
        config = replace(layout, recompute=kind).applied(self.config)
        cache = self._caches.setdefault(_sizes(layout), {})
        job = replace(self.job, config=config, place=where, cache=cache)
        return stage_time(job, stage).cost(job)


def _sizes(layout: Layout) -> tuple[int, ...]:
    """What a layer's time and bytes depend on, whatever its stage and the number of GPUs."""
    return layout.tensor, layout.expert, layout.expert_tensor, layout.micro_batch


def _first_passes(where: Placement, rank: int) -> list[int]:
    """How many forward passes of each of a rank's chunks wait when its first backward pass begins."""
    after, chunks = where.pipeline - 1 - rank, where.chunks
    if chunks == 1:
        return [min(where.micro_batches, after + 1)]
    passes = min(2 * after + (chunks - 1) * where.pipeline + 1, where.micro_batches * chunks)
    rounds, rest = divmod(passes, where.pipeline * chunks)
    return [
        rounds * where.pipeline + max(0, min(where.pipeline, rest - chunk * where.pipeline)) for chunk in range(chunks)
    ]

"""A layout's stages and recomputed layers as a linear model: what every layer adds to the time and the memory of the
rank that holds it.

Seconds and bytes of a layer are the planner's own. What is not linear, such as the moment within a pass at which a rank
is fullest, is a constant of each rank: the one that makes the model right at a cut that was planned in full
(`Linear.through`). So the model is exact there, and near it close.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from maniple.plan import memory, memory_layers, parameters
from maniple.plan.memory_chunks import Layers, chunk_of
from maniple.plan.memory_schedule import passes
from maniple.plan.parameters import RankParameters
from maniple.plan.search_bounds import Bounds
from maniple.plan.search_space import Layout, Recompute, layout_text
from maniple.plan.shapes import shapes
from maniple.plan.simulator import StageCost
from maniple.plan.stages import Placement, Stage


@dataclass(frozen=True)
class Run:
    """Consecutive units of one kind: layers alike, or all MTP depths, which stay together, as one.

    Of one unit: seconds of a micro-batch forward and backward, and more of them if it is computed again; bytes of its
    states, of what it keeps for backward, and fewer if it is computed again. stages: those that may hold any.
    """

    units: tuple[tuple[int, ...], ...]  # numbers of the layers in each
    symbol: str
    forward: float
    backward: float
    again: float
    states: float
    kept: float
    spared: float
    stages: range

    @property
    def length(self) -> int:
        return len(self.units)


@dataclass(frozen=True)
class Cut:
    """How many units of each run each stage holds, and how many of these are computed again: `[stage][run]`."""

    held: tuple[tuple[int, ...], ...]
    again: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Moment:
    """Of a pipeline rank: how many micro-batches of each of its chunks are kept for backward, and bytes beside."""

    waiting: tuple[int, ...]
    beside: float


@dataclass(frozen=True)
class Linear:
    """forward, backward, kept: of each stage without its units (embedding, head, what it receives). sends: seconds a
    micro-batch in which a rank does nothing but send; travel: of a message there and back. constant: bytes of each
    rank beside moments and units. recomputes: whether units may be computed again."""

    runs: tuple[Run, ...]
    pipeline: int
    chunks: int
    micro_batches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    kept: tuple[float, ...]
    sends: tuple[float, ...]
    travel: float
    moments: tuple[tuple[Moment, ...], ...]
    constant: tuple[float, ...]
    ceiling: float
    recomputes: bool

    @property
    def stages(self) -> int:
        return self.pipeline * self.chunks

    def work(self, cut: Cut) -> list[tuple[float, float]]:
        """Seconds of each stage, forward and backward, of one micro-batch."""
        out = []
        for stage, (held, again) in enumerate(zip(cut.held, cut.again, strict=True)):
            ahead, back = self.forward[stage], self.backward[stage]
            for run, number, twice in zip(self.runs, held, again, strict=True):
                ahead += number * run.forward
                back += number * run.backward + twice * run.again
            out.append((ahead, back))
        return out

    def pairs(self) -> list[tuple[int, int, int | None, int]]:
        """(turn, rank, chunk that goes forward, chunk that goes backward) of what an interleaved pipeline runs once it
        is full, a forward pass and a backward pass after it. A turn is of as many micro-batches as there are ranks,
        whose backward passes are of one chunk; forward they may be of two, or of none that is left."""
        ranks, chunks = self.pipeline, self.chunks
        out = set()
        for rank, turn in itertools.product(range(ranks), range(chunks if self.groups > 1 else 1)):
            warm_up = 2 * (ranks - rank - 1) + (chunks - 1) * ranks
            for slot in (turn * ranks, (turn + 1) * ranks - 1):
                number = (warm_up + slot) // ranks
                out.add((turn, rank, number % chunks if number < chunks * self.groups else None, chunks - 1 - turn))
        return sorted(out, key=str)

    @property
    def groups(self) -> int:
        """Of as many micro-batches as there are ranks."""
        return self.micro_batches // self.pipeline

    def seconds(self, cut: Cut) -> float:
        """Of the pipeline, as if no rank waited once its first backward pass has begun (one chunk a rank: a bound), or
        as if in every turn of an interleaved pipeline all ranks waited for the one that takes longest.

        One chunk: a rank's first backward pass comes when the first micro-batch has gone to the end and back to it,
        and by then p - r forward passes have run; from then on it has the others to run, and the ranks before it one
        more backward pass each. More chunks: first all of them but the last go forward, at the end all but the last
        go backward, and the ranks begin one after the other, where chunks differ by the largest.
        """
        work = self.work(cut)
        if self.chunks == 1:
            number, most = self.micro_batches, 0.0
            around = sum(map(sum, work)) + (self.pipeline - 1) * self.travel
            for rank, (forward, backward) in enumerate(work):
                rest = number - min(number, self.pipeline - rank)
                most = max(most, around + (number - 1) * backward + rest * (forward + self.sends[rank]))
            return most
        longest = [0.0] * self.chunks
        for turn, rank, ahead, back in self.pairs():
            pair = work[back * self.pipeline + rank][1]
            pair += 0.0 if ahead is None else work[ahead * self.pipeline + rank][0]
            longest[turn] = max(longest[turn], pair)
        turns = self.groups * longest[0] + (self.groups - 1) * sum(longest[1:])
        begun = 0.0
        for chunk in range(self.chunks):
            alike = work[chunk * self.pipeline : (chunk + 1) * self.pipeline]
            begun = max(begun, sum(map(sum, alike[:-1])) + (self.pipeline - 1) * self.travel)
            if chunk < self.chunks - 1:
                turns += max(ahead for ahead, _ in alike) + max(back for _, back in alike)
        return begun + self.pipeline * turns

    def sizes(self, cut: Cut) -> list[float]:
        """Bytes of each rank."""
        states, kept = [0.0] * self.pipeline, list(self.kept)
        for stage, (held, again) in enumerate(zip(cut.held, cut.again, strict=True)):
            for run, number, twice in zip(self.runs, held, again, strict=True):
                states[stage % self.pipeline] += number * run.states
                kept[stage] += number * run.kept - twice * run.spared
        return [
            self.constant[rank]
            + states[rank]
            + max(
                moment.beside + sum(map(float.__mul__, map(float, moment.waiting), kept[rank :: self.pipeline]))
                for moment in self.moments[rank]
            )
            for rank in range(self.pipeline)
        ]

    def through(self, cut: Cut, sizes: Sequence[float]) -> Linear:
        """The same, with constants for which `cut` needs `sizes`."""
        model = self.sizes(cut)
        return replace(
            self,
            constant=tuple(known + size - said for known, size, said in zip(self.constant, sizes, model, strict=True)),
        )

    def is_legal(self, cut: Cut) -> bool:
        """Whether the stages, in order, hold all units in order, and each something."""
        for index, run in enumerate(self.runs):
            column = [held[index] for held in cut.held]
            if sum(column) != run.length or any(
                count and stage not in run.stages for stage, count in enumerate(column)
            ):
                return False
            later = [stage for stage, held in enumerate(cut.held) if any(held[index + 1 :])]
            if later and any(column[min(later) + 1 :]):
                return False
        if any(not any(held) for held in cut.held[:-1]) or not cut.held[0][0]:
            return False
        held, again = itertools.chain(*cut.held), itertools.chain(*cut.again)
        most = (number if self.recomputes else 0 for number in held)
        return all(0 <= twice <= number for number, twice in zip(most, again, strict=True))

    def cut_of(self, where: Placement, recomputed: Sequence[int]) -> Cut:
        """Of a placement whose layers with these numbers are computed again."""
        counts = []
        for numbers in (None, set(recomputed)):
            counts.append(
                tuple(
                    tuple(
                        sum(unit[0] in holds and (numbers is None or numbers.issuperset(unit)) for unit in run.units)
                        for run in self.runs
                    )
                    for holds in map(_numbers(self), where.stages)
                )
            )
        return Cut(*counts)

    def layers_of(self, cut: Cut) -> tuple[str, tuple[int, ...]]:
        """(`parallel.pipeline_layout`, `recompute.layers`). Of layers alike a stage computes its first ones again: what
        they keep is there to the end of a backward pass, and the later ones are gone by then."""
        at = [0] * len(self.runs)
        texts, recomputed = [], []
        for held, again in zip(cut.held, cut.again, strict=True):
            text = ""
            for index, run in enumerate(self.runs):
                mine = run.units[at[index] : at[index] + held[index]]
                at[index] += held[index]
                text += run.symbol * held[index]
                recomputed += [number for unit in mine[: again[index]] for number in unit]
            texts.append(text)
        texts[0] = "E" + texts[0]
        texts[-1] += "L"
        return layout_text(texts), tuple(sorted(recomputed))


def _numbers(linear: Linear):
    """The layers of a stage by number, MTP depths after all others."""
    first_mtp = sum(run.length for run in linear.runs if run.symbol == "t")
    return lambda stage: {*stage.layers, *(first_mtp + depth for depth in stage.mtp)}


def linear_of(bounds: Bounds, layout: Layout, where: Placement, ceiling: int, *, recomputes: bool) -> Linear:
    """The model of `layout` and its `recompute.modules`, whose stages may become any. Its constants are no good yet:
    `through` sets them. recomputes: whole layers may be computed again."""
    config, card, profile = layout.applied(bounds.config), bounds.card, bounds.profile
    share = 1 + profile.slack
    overlapped = config.moe.overlap_exchange
    hidden = bounds.job.software.hidden if overlapped else 0.0

    def times(cost: StageCost) -> tuple[float, float]:
        back = cost.backward + cost.weight - hidden * (cost.exchange_forward + cost.exchange_backward)
        return cost.forward, back

    def states(count: RankParameters) -> float:
        return share * sum(memory.states_of(config, where, count).values())

    none, whole = bounds.layers(layout, where, bounds.kind(layout)), bounds.layers(layout, where, Recompute("full"))
    kinds = [
        (card.is_moe_layer(layer), config.precision.recipe_of(layer, card.num_layers))
        for layer in range(card.num_layers)
    ]
    stages = where.pipeline * where.chunks
    runs = []
    for _, group in itertools.groupby(range(card.num_layers), kinds.__getitem__):
        layers = list(group)
        mean = [sum(times(none[layer][0])[way] for layer in layers) / len(layers) for way in (0, 1)]
        again = sum(times(whole[layer][0])[1] for layer in layers) / len(layers) - mean[1]
        kept = max(none[layer][1] for layer in layers)
        parts = parameters.layer_parameters(card, where, layers[0])
        experts = parts.pop("routed_experts", 0)
        bytes_ = states(RankParameters(parts, {"routed_experts": experts}))
        bytes_ += share * memory.quantized_copies(config, card, where, layers[0], profile)
        spared = share * (kept - whole[layers[0]][1])
        units = tuple((layer,) for layer in layers)
        runs.append(Run(units, "t", mean[0], mean[1], again, bytes_, share * kept, spared, range(stages)))
    z = shapes(config, card, where, load=bounds.imbalance.factor(card.moe.num_experts, where.expert))
    held = Layers(config, card, z, profile)

    def kept_by(stage: Stage) -> int:
        chunk = chunk_of(held, stage)
        return sum(chunk.kept().values()) - chunk.given

    if card.num_mtp_layers:
        depths = tuple(range(card.num_mtp_layers))
        stage = Stage(0, 0, (), False, False, depths)
        numbers = tuple(card.num_layers + depth for depth in depths)
        ahead, back = times(bounds.end_cost(layout, where, stage))
        layer = held.held(numbers[0])
        runs.append(
            Run(
                (numbers,),
                "m" * len(depths),
                ahead,
                back,
                # a depth's layer is as the last decoder layer
                len(depths) * (times(whole[-1][0])[1] - times(none[-1][0])[1]),
                states(parameters.of_stage(config, card, where, stage)),
                share * kept_by(stage),
                share * len(depths) * (layer.kept_bytes - memory_layers.recomputed(layer).kept_bytes),
                # all of them in a stage of the last round, and on the first rank with the first stage alone
                range(stages - 1 if card.tied_embeddings or stages == 1 else stages - where.pipeline + 1, stages),
            )
        )
    ends = [Stage(0, 0, (), index == 0, index == stages - 1) for index in range(stages)]
    work = [times(bounds.end_cost(layout, where, stage)) for stage in ends]
    received = z.L * z.D * z.b
    send = bounds.send_seconds(layout, where)
    moments = [_moments(where, rank, overlapped, share * received) for rank in range(where.pipeline)]
    blocks = send if where.chunks == 1 and not overlapped else 0.0
    return Linear(
        runs=tuple(runs),
        pipeline=where.pipeline,
        chunks=where.chunks,
        micro_batches=where.micro_batches,
        forward=tuple(ahead for ahead, _ in work),
        backward=tuple(back for _, back in work),
        kept=tuple(share * (kept_by(stage) + (0 if stage.embedding else received)) for stage in ends),
        sends=tuple(((rank < where.pipeline - 1) + (rank > 0)) * blocks for rank in range(where.pipeline)),
        travel=0.0 if overlapped else 2 * send,
        moments=tuple(moments),
        constant=(0.0,) * where.pipeline,
        ceiling=float(ceiling),
        recomputes=recomputes,
    )


def _moments(where: Placement, rank: int, overlapped: bool, message: float) -> tuple[Moment, ...]:
    """What of a rank's passes waits for backward, with the one that runs and the messages that are there: of all
    moments those that can be the fullest."""
    seen: set[tuple[tuple[int, ...], float]] = set()
    flying = [0] * where.chunks
    messages = 0.0
    middle = 0 < rank < where.pipeline - 1 or where.chunks > 1
    order = passes(where, rank, overlapped=overlapped)
    for number, each in enumerate(order):
        if each.forward:
            flying[each.chunk] += 1
            here = list(flying)
            follower = order[number + 1] if number + 1 < len(order) else each
            if overlapped and not follower.forward and here[follower.chunk] > (follower.chunk == each.chunk):
                here[follower.chunk] -= 1  # it runs beside: what one gives up the other takes
            seen.add((tuple(here), messages * (2 if middle else 1)))
        else:
            messages = 2 * message if where.pipeline > 1 else 0.0
            seen.add((tuple(flying), messages))
            flying[each.chunk] -= 1
    largest: list[tuple[tuple[int, ...], float]] = []
    for waiting, beside in sorted(seen, key=lambda one: (-sum(one[0]), -one[1])):
        if not any(beside <= more and all(map(int.__le__, waiting, others)) for others, more in largest):
            largest.append((waiting, beside))
    return tuple(Moment(*one) for one in largest)

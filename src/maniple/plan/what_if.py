"""Plans around a job: the same planner's answers where micro-batch, PP, EP, recomputation or imbalance are others.

A grid of five axes, each with the job's own value and its neighbours. Axes grow in turns, as long as few enough jobs
are legal and their pipelines are short enough to simulate; what is not legal stays in the grid, with the reason.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from maniple.config.check import pipeline_stages
from maniple.config.schema import RecomputeConfig, TrainConfig
from maniple.errors import UserError
from maniple.hardware.card import GPU
from maniple.models.card import ModelCard
from maniple.plan.imbalance import Imbalance, in_words
from maniple.plan.report import MemoryPlan, memory_plan
from maniple.plan.search_space import balanced_stages, layout_text
from maniple.plan.stages import Placement, place
from maniple.plan.time import StepTime, estimate

MOST_PLANS = 120
# slots of simulated pipelines, of all plans together: they are what takes time, a second each 50,000 or so
MOST_SLOTS = 300_000

Sets = Mapping[str, Any]  # dotted keys and their values, as `--set` takes them
Where = tuple[int, ...]  # a place in the grid: an index into each axis' values


@dataclass(frozen=True)
class Value:
    """One position of an axis. sets: what it changes in the job, other ways to the same first where there are several;
    imbalance: the text that it puts in the place of the job's."""

    label: str
    ways: tuple[Sets, ...] = ({},)
    imbalance: str | None = None


@dataclass(frozen=True)
class Axis:
    """values are in rising order; own is the job's."""

    name: str
    values: tuple[Value, ...]
    own: int


@dataclass(frozen=True)
class Cell:
    """A job of the grid: with its plan, or why it cannot run. sets: all that it changes in the job."""

    sets: Sets
    imbalance: str
    memory: MemoryPlan | None = None
    time: StepTime | None = None
    why: str = ""


@dataclass(frozen=True)
class Grid:
    axes: tuple[Axis, ...]
    cells: Mapping[Where, Cell]

    @property
    def own(self) -> Where:
        """Where the job itself is."""
        return tuple(axis.own for axis in self.axes)


def grid(
    config: TrainConfig,
    card: ModelCard,
    gpu: GPU,
    world_size: int,
    imbalance: str,
    *,
    most_plans: int = MOST_PLANS,
    most_slots: int = MOST_SLOTS,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Grid:
    """Plans every legal job of the grid; progress hears how many of them are done.

    imbalance: as on the command line. Raises UserError if the job itself cannot run.
    """
    place(config, card, world_size)
    legal = _Legal(config, card, world_size)
    axes = _grown(list(_candidates(config, card, world_size, imbalance)), legal, most_plans, most_slots)
    total = sum(not isinstance(legal(values), str) for values in _every(axes))
    cells: dict[Where, Cell] = {}
    done = 0
    for where, values in zip(_places(axes), _every(axes), strict=True):
        text = next(value.imbalance for value in values if value.imbalance is not None)
        found = legal(values)
        if isinstance(found, str):
            cells[where] = Cell({}, text, why=found)
            continue
        sets, _ = found
        job, uneven = changed(config, sets), Imbalance.parse(text)
        try:
            memory = memory_plan(job, card, gpu, world_size, uneven)
            cells[where] = Cell(sets, text, memory, estimate(job, card, gpu, world_size, imbalance=uneven))
        except UserError as error:  # what only the time model refuses
            if where == tuple(axis.own for axis in axes):
                raise
            cells[where] = Cell(sets, text, why=str(error))
        done += 1
        progress(done, total)
    return Grid(tuple(axes), cells)


def changed(config: TrainConfig, sets: Sets) -> TrainConfig:
    """The job with other values. They go through the schema's validation nowhere: they are this module's own."""
    sections: dict[str, dict[str, Any]] = {}
    for key, value in sets.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    update = {name: getattr(config, name).model_copy(update=values) for name, values in sections.items()}
    return config.model_copy(update=update)


def _now(config: TrainConfig, key: str) -> Any:
    section, name = key.split(".")
    return getattr(getattr(config, section), name)


def as_words(sets: Sets) -> list[str]:
    """What to add to a command line."""

    def text(value: Any) -> str:
        return yaml.safe_dump(value, default_flow_style=True, width=10_000).removesuffix("...\n").strip()

    return [word for key, value in sets.items() for word in ("--set", f"{key}={text(value)}")]


# --- which jobs -------------------------------------------------------------------------------------------------------


class _Legal:
    """(what to set, its placement) of a combination of values, or why none of its ways can run. Each is tried once."""

    def __init__(self, config: TrainConfig, card: ModelCard, world_size: int) -> None:
        self.config, self.card, self.world_size = config, card, world_size
        self.known: dict[tuple[str, ...], tuple[dict[str, Any], Placement] | str] = {}

    def __call__(self, values: Iterable[Value]) -> tuple[dict[str, Any], Placement] | str:
        values = [value for value in values if value.imbalance is None]
        key = tuple(value.label for value in values)
        if key not in self.known:
            self.known[key] = self._tried(values)
        return self.known[key]

    def _tried(self, values: list[Value]) -> tuple[dict[str, Any], Placement] | str:
        why = ""
        for ways in itertools.product(*(value.ways for value in values)):
            sets = {key: value for way in ways for key, value in way.items() if value != _now(self.config, key)}
            try:
                return sets, place(changed(self.config, sets), self.card, self.world_size)
            except UserError as error:
                why = why or str(error)
        return why


def _grown(candidates: list[tuple[str, list[Value], list[Value]]], legal: _Legal, plans: int, slots: int) -> list[Axis]:
    """Axes of (name, values by preference, all of them in order), as many values as the bounds allow, and none that
    is legal nowhere."""
    taken = [[preferred[0]] for _, preferred, _ in candidates]
    for turn in range(1, max(len(preferred) for _, preferred, _ in candidates)):
        for index, (_, preferred, _) in enumerate(candidates):
            if turn >= len(preferred):
                continue
            more = [*taken[:index], [*taken[index], preferred[turn]], *taken[index + 1 :]]
            found = [one[1] for values in itertools.product(*more) if not isinstance(one := legal(values), str)]
            if len(found) <= plans and sum(map(_slots, found)) <= slots:
                taken = more
    some = {
        value.label for values in itertools.product(*taken) if not isinstance(legal(values), str) for value in values
    }
    axes = []
    for (name, preferred, ordered), kept in zip(candidates, taken, strict=True):
        values = tuple(value for value in ordered if value in kept and value.label in some)
        axes.append(Axis(name, values, values.index(preferred[0])))
    return axes


def _slots(where: Placement) -> int:
    """Of what `plan.time` simulates of a pipeline."""
    return 2 * len(where.stages) * min(where.micro_batches, 11 * where.pipeline)


def _every(axes: list[Axis]) -> Iterator[tuple[Value, ...]]:
    return itertools.product(*(axis.values for axis in axes))


def _places(axes: list[Axis]) -> Iterator[Where]:
    return itertools.product(*(range(len(axis.values)) for axis in axes))


# --- axes -------------------------------------------------------------------------------------------------------------


def _candidates(
    config: TrainConfig, card: ModelCard, world_size: int, imbalance: str
) -> Iterator[tuple[str, list[Value], list[Value]]]:
    """(name, values by preference with the job's first, the same in the slider's order)."""
    train, parallel = config.train, config.parallel

    def sizes(own: int, values: Callable[[int], Value], fits: Callable[[int], bool]) -> tuple[list[Value], list[Value]]:
        near = [own, own // 2, own * 2] if own % 2 == 0 else [own, own * 2, own * 4]
        by_size = {size: values(size) for size in near if size == own or fits(size)}
        return list(by_size.values()), [by_size[size] for size in sorted(by_size)]

    key = "parallel.pipeline_parallel_size"
    yield (
        "Pipeline-parallel size",
        *sizes(
            parallel.pipeline_parallel_size,
            lambda size: Value(
                f"PP {size}",
                ({},)
                if size == parallel.pipeline_parallel_size
                else tuple({key: size, **cut} for cut in _cuts(config, card, size)),
            ),
            lambda size: size <= card.num_layers,
        ),
    )
    yield (
        "Expert-parallel size",
        *sizes(
            parallel.expert_parallel_size,
            lambda size: _own(f"EP {size}", "parallel.expert_parallel_size", size, parallel.expert_parallel_size),
            lambda size: card.moe.num_experts % size == 0,
        ),
    )
    kinds = _recomputes(config.recompute)
    yield "Recomputation", kinds, sorted(kinds, key=lambda value: _RECOMPUTES.get(value.label, _PARTLY))
    yield (
        "Micro-batch size",
        *sizes(
            train.micro_batch_size,
            lambda size: _own(_sequences(size), "train.micro_batch_size", size, train.micro_batch_size),
            lambda size: train.global_batch_size % size == 0,
        ),
    )
    others = ("balanced", "dirichlet:8", "dirichlet:2") if world_size > 1 else ()
    texts = [imbalance, *(text for text in others if text != imbalance)]
    loads = {text: Imbalance.parse(text).factor(card.moe.num_experts, card.moe.num_experts) for text in texts}
    uneven = {text: Value(_load(text), imbalance=text) for text in texts}
    yield "Router imbalance", list(uneven.values()), [uneven[text] for text in sorted(texts, key=loads.__getitem__)]


def _own(label: str, key: str, value: int, own: int) -> Value:
    return Value(label, ({} if value == own else {key: value},))


def _sequences(size: int) -> str:
    return f"{size} sequence{'s' if size > 1 else ''}"


def _load(text: str) -> str:
    try:
        return f"{in_words(float(text))} × the mean"
    except ValueError:
        return text


def _cuts(config: TrainConfig, card: ModelCard, pipeline: int) -> Iterator[Sets]:
    """How to cut the model for another pipeline size: as the job does, evenly, or as a search would; with as many
    chunks a rank as the job has, or with one."""
    yield {}
    try:
        chunks = pipeline_stages(config, card)[1]
    except UserError:
        chunks = 1
    for number in sorted({chunks if pipeline > 1 else 1, 1}, reverse=True):
        yield {"parallel.pipeline_layout": None, "parallel.virtual_pipeline_size": number if number > 1 else None}
        if 1 < pipeline * number <= card.num_layers:
            text = layout_text(balanced_stages(card, pipeline * number))
            yield {"parallel.pipeline_layout": text, "parallel.virtual_pipeline_size": None}


_RECOMPUTES = {"nothing": 0, "experts’ activation": 1, "MoE layers": 3, "whole layers": 4}
_PARTLY = 2


def _recomputes(own: RecomputeConfig) -> list[Value]:
    plain: dict[str, Any] = {"granularity": "none", "num_layers": None, "layers": [], "modules": []}
    choices = {
        "nothing": plain,
        "whole layers": plain | {"granularity": "full"},
        "MoE layers": plain | {"granularity": "selective", "modules": ["moe"]},
        "experts’ activation": plain | {"granularity": "selective", "modules": ["moe_act"]},
    }
    now = {key: getattr(own, key) for key in plain}
    label = next((label for label, values in choices.items() if values == now), None) or _said(own)
    return [
        Value(label),
        *(
            Value(other, ({f"recompute.{key}": value for key, value in values.items() if value != now[key]},))
            for other, values in choices.items()
            if other != label
        ),
    ]


def _said(own: RecomputeConfig) -> str:
    if own.granularity == "selective":
        return ", ".join(own.modules)
    if own.layers:
        return f"{len(own.layers)} layers" if len(own.layers) > 1 else f"layer {own.layers[0]}"
    return f"{own.num_layers} layer{'s' if own.num_layers != 1 else ''} a chunk"

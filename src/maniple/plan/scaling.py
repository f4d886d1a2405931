"""One layout on more and more GPUs: data parallelism grows, with the batch (weak scaling) or at the same batch
(strong)."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.hardware.card import GPU
from maniple.hardware.units import three_digits
from maniple.models.card import ModelCard
from maniple.plan import memory
from maniple.plan.imbalance import Imbalance
from maniple.plan.profile import profile_of
from maniple.plan.report import certain
from maniple.plan.stages import check_number
from maniple.plan.time import estimate

BEND = 0.9  # of the first size's speed a GPU

Kind = Literal["weak", "strong"]

_LEAST = 1e-4  # seconds
# parts whose names alone do not say what they are
_WORDS = {"bubble": "the pipeline's bubble", "gaps": "gaps between kernels", "host": "waiting for the host"}


@dataclass(frozen=True)
class Point:
    """A number of GPUs. efficiency: tokens a second and GPU over those of the first size; parts: the step's seconds by
    what they go to, as `StepTime.components`. All but the first three are empty where the job cannot run there, and
    `why` says why not. memory: the fullest rank's, in bytes; certain: whether the error band leaves no doubt of
    `fits`."""

    kind: Kind
    gpus: int
    global_batch_size: int
    micro_batches: int | None = None
    seconds: float | None = None
    tokens_per_second_per_gpu: float | None = None
    efficiency: float | None = None
    bubble: float | None = None
    memory: int | None = None
    fits: bool | None = None
    certain: bool | None = None
    why: str = ""
    parts: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def sizes(first: int, last: int) -> list[int]:
    """first, twice as many, ... up to last. Raises UserError for less than one GPU, a last below the first, and more
    GPUs than `stages.MOST_GPUS`."""
    if first < 1:
        raise UserError(f"--from {first}: a job has at least one GPU")
    if last < first:
        raise UserError(f"--to {last} is less than --from {first}: give the larger size last")
    check_number(last)
    out = [first]
    while out[-1] * 2 <= last:
        out.append(out[-1] * 2)
    return out


def scale(
    config: TrainConfig, card: ModelCard, gpu: GPU, gpus: Sequence[int], kind: Kind, imbalance: Imbalance | None = None
) -> list[Point]:
    """`config` with its layout on each of `gpus`, of which the first is the size that its batch is for.

    Raises UserError if it cannot run on the first.
    """
    profile = profile_of(gpu)
    out: list[Point] = []
    for number in gpus:
        size = config.train.global_batch_size
        if kind == "weak":
            size = size * number // gpus[0]
        job = config.model_copy(update={"train": config.train.model_copy(update={"global_batch_size": size})})
        try:
            time = estimate(job, card, gpu, number, imbalance=imbalance)
        except UserError as error:
            if not out:
                raise
            out.append(Point(kind, number, size, why=str(error)))
            continue
        most = memory.tightest(memory.of_job(job, card, number, profile, imbalance=imbalance)).total
        speed = time.tokens_per_second_per_gpu
        first = out[0].tokens_per_second_per_gpu if out else speed
        out.append(
            Point(
                kind,
                number,
                size,
                time.micro_batches,
                time.seconds,
                speed,
                speed / (first or speed),
                max(time.bubbles),
                most,
                most <= gpu.memory_bytes,
                certain(most, gpu),
                parts=time.components,
            )
        )
    return out


def bend(points: Sequence[Point]) -> str:
    """Where a GPU's speed falls under nine tenths of the first size's, by which part of the step, and where the job
    stops. The first of `points` is one that runs."""
    kind, first = points[0].kind, points[0]
    running = list(itertools.takewhile(lambda point: point.efficiency is not None, points))
    last = running[-1]
    bent = next((point for point in running if (point.efficiency or 0.0) < BEND), None)
    stops = points[len(running)].why if len(running) < len(points) else ""
    said = []
    if bent is not None:
        said.append(
            f"{kind} scaling bends at {bent.gpus:,} GPUs: {bent.efficiency:.1%} of the speed a GPU at {first.gpus:,}; "
            f"{_grown(first, bent)}"
        )
    elif stops:
        said.append(f"{kind} scaling stops after {last.gpus:,} GPUs: {stops}")
    elif last is first:
        said.append(f"{kind} scaling: {first.gpus:,} GPUs are the only size")
    else:
        said.append(
            f"{kind} scaling does not bend up to {last.gpus:,} GPUs: {last.efficiency:.1%} of the speed a GPU; "
            f"{_grown(first, last)}"
        )
    if bent is not None and stops:
        said.append(f"it stops after {last.gpus:,} GPUs: {stops}")
    if not all(point.fits for point in running):
        fitting = next((point for point in running if point.fits), None)
        said.append("it fits none of them" if fitting is None else f"it fits from {fitting.gpus:,} GPUs on")
    return "; ".join(said)


def grown(first: Point, point: Point) -> dict[str, float]:
    """Seconds of a step at `point` beyond those that it had at the first size's speed, by part, the most first.

    At that speed every part takes as long for a GPU's token as at `first`: in weak scaling as long for a step, in
    strong scaling as much less as there are more GPUs. All together they are the step's seconds beyond those.
    """
    ideal = _ideal(first, point)
    more = {part: point.parts.get(part, 0.0) - ideal * first.parts.get(part, 0.0) for part in first.parts | point.parts}
    return dict(sorted(more.items(), key=lambda item: -item[1]))


def _ideal(first: Point, point: Point) -> float:
    """A GPU's tokens at `point` over those at `first`."""
    return point.global_batch_size / point.gpus / (first.global_batch_size / first.gpus)


def _grown(first: Point, point: Point) -> str:
    """Which part of the step grew most, in milliseconds, and what ranks idle."""
    part, more = next(iter(grown(first, point).items()))
    idle = ""
    if (point.bubble or 0.0) - (first.bubble or 0.0) >= 0.005:
        idle = f"; ranks idle up to {point.bubble:.0%}, against {first.bubble:.0%}"
    if more < _LEAST:
        return f"no part of the step grew by a tenth of a millisecond{idle}"
    now, then = point.parts.get(part, 0.0), _ideal(first, point) * first.parts.get(part, 0.0)
    return (
        f"{_WORDS.get(part, part.replace('_', ' '))} grew most: {milliseconds(now)} of a step's "
        f"{milliseconds(point.seconds or 0.0)} ms, where {milliseconds(then)} ms would keep the speed{idle}"
    )


def milliseconds(seconds: float) -> str:
    """With a tenth where there are fewer than three digits: 1,760 or 17.6 or 0.2."""
    value = 1e3 * seconds
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


# columns that a narrow terminal does without
SPARE = ("idle", "micro-batches", "batch", "tokens/s a GPU", "GiB", "fits", "seconds")
HEADINGS = [
    "scaling",
    "GPUs",
    "batch",
    "micro-batches",
    "seconds",
    "tokens/s a GPU",
    "efficiency",
    "idle",
    "GiB",
    "fits",
]


def rows(points: Sequence[Point]) -> list[list[str]]:
    """One row a size; `HEADINGS` names the columns."""
    return [
        [
            point.kind,
            f"{point.gpus:,}",
            f"{point.global_batch_size:,}",
            *(
                ["-"] * 7
                if point.seconds is None
                else [
                    f"{point.micro_batches:,}",
                    three_digits(point.seconds),
                    f"{point.tokens_per_second_per_gpu:,.0f}",
                    f"{point.efficiency:.1%}",
                    f"{point.bubble:.0%}",
                    f"{(point.memory or 0) / 2**30:,.1f}",
                    ("yes" if point.fits else "no") if point.certain else "perhaps",
                ]
            ),
        ]
        for point in points
    ]

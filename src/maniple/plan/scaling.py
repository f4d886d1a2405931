"""One layout on more and more GPUs: data parallelism grows, with the batch (weak scaling) or at the same batch
(strong)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.hardware.card import GPU
from maniple.models.card import ModelCard
from maniple.plan import memory
from maniple.plan.imbalance import Imbalance
from maniple.plan.profile import profile_of
from maniple.plan.time import estimate

BEND = 0.9  # of the first size's speed a GPU

Kind = Literal["weak", "strong"]


@dataclass(frozen=True)
class Point:
    """A number of GPUs. efficiency: tokens a second and GPU over those of the first size. All but the first three are
    None where the job cannot run there, and `why` says why not; memory is the fullest rank's, in bytes."""

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
    why: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def sizes(first: int, last: int) -> list[int]:
    """first, twice as many, ... up to last. Raises UserError for less than one GPU and a last below the first."""
    if first < 1:
        raise UserError(f"--from {first}: a job has at least one GPU")
    if last < first:
        raise UserError(f"--to {last} is less than --from {first}: give the larger size last")
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
            )
        )
    return out


def bend(points: Sequence[Point]) -> str:
    """Where a GPU's speed falls under nine tenths of the first size's, or the job stops."""
    kind, last = points[0].kind, points[0]
    for point in points:
        if point.efficiency is None:
            return f"{kind} scaling ends behind {last.gpus:,} GPUs: {point.why}"
        if point.efficiency < BEND:
            return (
                f"{kind} scaling bends at {point.gpus:,} GPUs: {point.efficiency:.0%} of the speed a GPU at "
                f"{points[0].gpus:,}; ranks idle up to {point.bubble:.0%}, against {points[0].bubble:.0%}"
            )
        last = point
    return f"{kind} scaling does not bend up to {last.gpus:,} GPUs: {last.efficiency:.0%} of the speed a GPU"


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
                    f"{point.seconds:.3g}",
                    f"{point.tokens_per_second_per_gpu:,.0f}",
                    f"{point.efficiency:.1%}",
                    f"{point.bubble:.0%}",
                    f"{(point.memory or 0) / 2**30:,.1f}",
                    "yes" if point.fits else "no",
                ]
            ),
        ]
        for point in points
    ]

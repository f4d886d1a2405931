"""A step's time in words: as JSON and as tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from maniple.config.schema import TrainConfig
from maniple.hardware.card import GPU
from maniple.hardware.units import three_digits
from maniple.models.card import ModelCard
from maniple.plan.imbalance import Imbalance, in_words
from maniple.plan.time import StepTime, make_job, simulated_step
from maniple.plan.timeline import trace_events
from maniple.plan.whole_file import write_new

_MOST_PASSES = 8  # micro-batches of a timeline for each pipeline rank: more of them look alike


def headline(time: StepTime) -> str:
    first, last = min(time.bubbles), max(time.bubbles)
    idle = f"{first:.0%}" if last - first < 0.005 else f"{first:.0%} to {last:.0%}"
    return (
        f"a step takes {three_digits(time.seconds)} s: {time.tokens_per_second_per_gpu:,.0f} tokens/s and "
        f"{time.tflops_per_gpu:,.0f} TFLOP/s a GPU, MFU {time.mfu:.1%}; schedule {time.schedule}, ranks idle {idle}"
    )


def headings(time: StepTime) -> list[str]:
    return ["step" if len(time.bubbles) == 1 else f"step, rank {time.busiest}", "seconds", "share"]


def rows(time: StepTime) -> list[list[str]]:
    """The rank that computes longest, by what it does."""
    return [
        [part.replace("_", " "), f"{seconds:.3f}", f"{seconds / time.seconds:.1%}"]
        for part, seconds in time.components.items()
    ]


def notes(time: StepTime) -> list[str]:
    """What an estimate stands on that is not the GPU's own."""
    load = f"the fullest rank's experts have {in_words(time.load_factor)} times the mean load"
    return [*([load] if time.load_factor > 1 else []), *time.assumptions]


def as_json(time: StepTime) -> dict[str, Any]:
    """Plain data; seconds, and shares of 1."""
    return time.as_json()


def write_timeline(
    config: TrainConfig,
    card: ModelCard,
    gpu: GPU,
    world_size: int,
    file: Path,
    *,
    imbalance: Imbalance | None = None,
    schedule: str | None = None,
) -> int:
    """Writes the simulated pipeline as a Chrome trace; returns how many micro-batches are in it, from the first.

    schedule: of `schedules.SCHEDULES`; None is the engine's own. Raises UserError if the file cannot be written.
    """
    job = make_job(config, card, gpu, world_size, imbalance=imbalance)
    number = min(job.place.micro_batches, _MOST_PASSES * job.place.pipeline)
    write_new("--pipeline-trace", file, json.dumps(trace_events(simulated_step(job, schedule, number))))
    return number

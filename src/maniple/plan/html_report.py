"""A plan as one HTML file: headline, memory, time, pipeline, scaling, and plans around the job to choose from.

The file stands alone: its styles and scripts are in it, it asks for nothing else, and its policy forbids it to. All
figures are the planner's, in one JSON block; the page's scripts draw them and compute none.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import maniple
from maniple.config.schema import TrainConfig
from maniple.hardware.card import GPU
from maniple.hardware.units import three_digits
from maniple.models.card import ModelCard
from maniple.plan import report, scaling, time_report, what_if
from maniple.plan.imbalance import Imbalance
from maniple.plan.simulator import StageCost
from maniple.plan.stage_time import stage_time
from maniple.plan.stages import MOST_GPUS
from maniple.plan.time import make_job, simulated_step
from maniple.plan.whole_file import write_new
from maniple.terminal import in_one_line

SCALES = 8  # times as many GPUs are the most that scaling looks at
MOST_SPANS = 24_000  # passes of a drawn pipeline; of longer steps the first micro-batches are simulated alone

# what the step's parts are, for their colours; all others are computation
_FAMILIES = {
    "exchange": "exchange",
    "recompute": "recompute",
    "bubble": "idle",
    "gaps": "idle",
    "host": "idle",
    **dict.fromkeys(("tensor_parallel", "context_parallel"), "collectives"),
    **dict.fromkeys(("gradient_reduction", "parameter_gathering", "optimizer"), "update"),
}


@dataclass(frozen=True)
class Asked:
    """The job that a report is of. words: the command that plans it, with what it assumed and without `--imbalance`;
    advice: lines of what may help it."""

    config: TrainConfig
    card: ModelCard
    gpu: GPU
    world_size: int
    imbalance: str
    words: Sequence[str]
    assumed: dict[str, Any]
    advice: tuple[str, ...] = ()


def write(asked: Asked, file: Path) -> None:
    """Plans what the page shows, saying on standard error how far it is, and writes the page.

    Raises UserError if the file cannot be written; one that is there stays.
    """
    text = page(data_of(asked, _said_on_stderr()))
    write_new("--report", file, text)
    print(f"maniple: {in_one_line(str(file))}: the report, {len(text.encode()) / 1e6:.1f} MB", file=sys.stderr)


def _said_on_stderr() -> Callable[[int, int], None]:
    """Counts in place on a terminal, and else speaks once."""
    terminal = sys.stderr.isatty()

    def say(done: int, total: int) -> None:
        if terminal:
            last = "\n" if done == total else ""
            print(f"\rmaniple: report: plan {done} of {total} around the job", end=last, file=sys.stderr, flush=True)
        elif done == 1:
            print(f"maniple: report: {total} plans around the job", file=sys.stderr, flush=True)

    return say


# --- the page's data --------------------------------------------------------------------------------------------------


def data_of(asked: Asked, progress: Callable[[int, int], None] = lambda done, total: None) -> dict[str, Any]:
    """All that the page shows, as plain data: seconds, bytes, shares of 1.

    cells: plans around the job, in the order of the axes' values, the last axis fastest; own: which is the job itself.
    """
    config, card, gpu = asked.config, asked.card, asked.gpu
    grid = what_if.grid(config, card, gpu, asked.world_size, asked.imbalance, progress=progress)
    return {
        "version": maniple.__version__,
        "model": card.name,
        "gpu": gpu.name,
        "gpus": asked.world_size,
        "capacity": gpu.memory_bytes,
        "batch": config.train.global_batch_size,
        "sequence": config.data.sequence_length,
        "assumed": {key: str(value) for key, value in asked.assumed.items()},
        "advice": asked.advice,
        "axes": [
            {"name": axis.name, "values": [value.label for value in axis.values], "own": axis.own} for axis in grid.axes
        ],
        "cells": [_cell(asked, cell) for cell in grid.cells.values()],
        "own": list(grid.cells).index(grid.own),
        "timeline": timeline(asked),
        "scaling": _scaling(asked),
    }


def _cell(asked: Asked, cell: what_if.Cell) -> dict[str, Any]:
    plan, time = cell.memory, cell.time
    if plan is None or time is None:
        return {"why": cell.why}
    where, tight = plan.placement, plan.tightest
    return {
        "command": _command([*asked.words, *what_if.as_words(cell.sets), "--imbalance", cell.imbalance]),
        "fits": plan.fits,
        "certain": plan.certain,
        "verdict": plan.verdict,
        "band": plan.band,
        "layout": (
            f"TP {where.tensor} · PP {where.pipeline}{f' × {where.chunks}' if where.chunks > 1 else ''} · "
            f"CP {where.context} · DP {where.data} · EP {where.expert} · ETP {where.expert_tensor}"
        ),
        "micro_batches": where.micro_batches,
        "micro_batch": plan.config.train.micro_batch_size,
        "tightest": tight.rank,
        "total": tight.total,
        "ranks": [
            {
                "holds": report.held_chunks(plan, rank),
                "parameters": rank.parameters.total,
                "bytes": report.kinds_of(rank),
            }
            for rank in plan.ranks
        ],
        "components": report.components_of(tight),
        "seconds": time.seconds,
        "tgs": time.tokens_per_second_per_gpu,
        "tflops": time.tflops_per_gpu,
        "mfu": time.mfu,
        "schedule": time.schedule,
        "bubbles": time.bubbles,
        "parts": [
            (part.replace("_", " "), seconds, _FAMILIES.get(part, "compute"))
            for part, seconds in time.components.items()
        ],
        "notes": [*time_report.notes(time), *filter(None, [report.host_line(plan)])],
    }


def _command(words: Sequence[str]) -> str:
    """For a shell, an option a line."""
    return "".join(
        f" \\\n  {shlex.quote(word)}" if word.startswith("--") else f" {shlex.quote(word)}" for word in words
    )[1:]


def timeline(asked: Asked) -> dict[str, Any]:
    """The simulated pipeline. A rank's passes are a flat list of three integers each: microseconds since the one before
    ended, which of `passes` it is, its first micro-batch (and in a slot of two passes the second's)."""
    job = make_job(asked.config, asked.card, asked.gpu, asked.world_size, imbalance=Imbalance.parse(asked.imbalance))
    where = job.place
    number = where.micro_batches
    if 2 * len(where.stages) * number > MOST_SPANS:
        groups = max(1, MOST_SPANS // (2 * len(where.stages) * where.pipeline))
        number = min(number, groups * where.pipeline)
    run = simulated_step(job, micro_batches=number)
    costs = [stage_time(job, stage).cost(job) for stage in where.stages]
    passes: dict[tuple, int] = {}
    described: list[dict[str, Any]] = []
    ranks = []
    for rank, spans in enumerate(run.spans):
        flat: list[int] = []
        at = 0
        for span in spans:
            key = (rank, *((task.kind, task.chunk) for task in span.slot))
            seconds = span.end - span.start
            if key not in passes:
                passes[key] = len(described)
                tasks = [(task.kind, costs[run.schedule.stages[rank][task.chunk]]) for task in span.slot]
                described.append(
                    {
                        "kinds": "".join(task.kind for task in span.slot),
                        "chunks": [task.chunk for task in span.slot],
                        "stages": [run.schedule.stages[rank][task.chunk] for task in span.slot],
                        "us": round(seconds * 1e6),
                        "exchange": _exposed(tasks, seconds),
                    }
                )
            start = round(span.start * 1e6)
            flat += [start - at, passes[key], *(task.micro_batch for task in span.slot)]
            at = start + described[passes[key]]["us"]
        ranks.append(flat)
    return {
        "micro_batches": number,
        "of": where.micro_batches,
        "schedule": run.schedule.name,
        "seconds": run.seconds,
        "passes": described,
        "ranks": ranks,
        "idle": [run.idle_share(rank) for rank in range(where.pipeline)],
    }


def _exposed(tasks: Sequence[tuple[str, StageCost]], seconds: float) -> float:
    """The share of a slot that waits for token exchange: what is left of it beside the other work of its passes."""
    work = 0.0
    for kind, cost in tasks:
        if kind == "F":
            work += cost.forward - cost.exchange_forward
        elif kind == "B":
            work += cost.backward + cost.weight - cost.exchange_backward
        else:
            work += cost.weight
    return max(0.0, seconds - work) / seconds if seconds else 0.0


def _scaling(asked: Asked) -> dict[str, Any]:
    sizes = scaling.sizes(asked.world_size, min(SCALES * asked.world_size, MOST_GPUS))
    uneven = Imbalance.parse(asked.imbalance)
    curves = [scaling.scale(asked.config, asked.card, asked.gpu, sizes, kind, uneven) for kind in ("weak", "strong")]
    return {
        "points": [[point.as_json() for point in points] for points in curves],
        "bends": [scaling.bend(points) for points in curves],
        "bend": scaling.BEND,
    }


# --- the page ---------------------------------------------------------------------------------------------------------


def page(data: dict[str, Any]) -> str:
    """The HTML text. Names and paths in `data` are text wherever they appear, whatever they hold."""
    style = _part("report.css")
    script = "\n".join(_part(name) for name in ("charts.js", "timeline.js", "report.js"))
    # the browser runs this script and no other, and loads nothing
    policy = f"default-src 'none'; style-src {_digest(style)}; script-src {_digest(script)}; img-src data:; "
    policy += "base-uri 'none'; form-action 'none'"
    own = data["cells"][data["own"]]
    fields = {
        "title": html.escape(f"{data['model']} on {data['gpus']:,} × {data['gpu']}"),
        "layout": html.escape(own["layout"]),
        "verdict": html.escape(own["verdict"]),
        "speed": html.escape(
            f"{three_digits(own['seconds'])} s a step, {own['tgs']:,.0f} tokens/s a GPU, MFU {own['mfu']:.1%}"
        ),
        "policy": html.escape(policy),
        "style": style,
        "data": _json(data),
        "script": script,
    }
    # in one pass: what a field holds is no place to put a field
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], _part("report.html"))


def _part(name: str) -> str:
    return resources.files("maniple.plan").joinpath("page", name).read_text(encoding="utf-8")


def _json(data: dict[str, Any]) -> str:
    """JSON that ends no script element and opens no comment: `<`, `>` and `&` are written as escapes."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return re.sub("[<>&]", lambda letter: f"\\u{ord(letter[0]):04x}", text)


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

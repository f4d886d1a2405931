"""The dry run of a whole job: every distinct rank's program, compared with its partners' and run against them.

Ranks of one pipeline stage are alike. They hold the same layers, cut into equal parts (what does not divide is refused,
what is laid out in buffers is padded), and differ by which part, which experts and which samples are theirs: by values,
which decide no communication. So one rank a stage is run, another place in it at each stage. Nor do passes differ by
the number of their micro-batch: those like an earlier one are not run (`passes.py`). To see that both claims hold, at
three stages another rank is run, as far from the first as can be, and every pass of it.
"""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from maniple.config.schema import TrainConfig
from maniple.engines.megatron.dry_run.matching import Fault, World, alike, compare, same_groups, simulate
from maniple.engines.megatron.dry_run.one_rank import RankProgram
from maniple.errors import UserError
from maniple.models.card import ModelCard

FAULTS_EXIT_CODE = 3  # of a dry run that found ranks which do not fit


@dataclass(frozen=True)
class AllRanks:
    """A job's programs, one a pipeline stage, and what does not fit. `again`: ranks run whole, to check that ranks of a
    stage are alike, and passes of a rank."""

    world_size: int
    stages: list[RankProgram]
    again: list[RankProgram]
    faults: list[Fault]
    seconds: float


def distinct_ranks(world_size: int, stages: int) -> tuple[list[int], list[int]]:
    """One rank of each pipeline stage, by stage; and those to be run whole, of the first, the middle and the last
    stage: other ones, where a stage has more than one."""
    size = world_size // stages  # upstream's order of ranks has the pipeline outermost
    # from the first place in the first stage to the last in the last, so that all kinds of places are among them
    first = [stage * size + stage * (size - 1) // max(1, stages - 1) for stage in range(stages)]
    far = [size - 1, stages // 2 * size + size - 1, (stages - 1) * size]
    return first, sorted(set(far))


def examine(programs: list[RankProgram], again: list[RankProgram], world_size: int) -> list[Fault]:
    """All that is wrong with the programs of one rank a stage, and of ranks run whole that are to be like them."""
    size = world_size // len(programs)
    stages, more = [p.program for p in programs], [p.program for p in again]
    faults = same_groups([*stages, *more])
    if faults:
        return faults
    for other in more:
        faults += alike(stages[other.rank // size], other)
    world = World(stages, lambda rank: rank // size)
    return [*faults, *compare(world), *simulate(world)]


def check(
    job: TrainConfig,
    card: ModelCard,
    world_size: int,
    *,
    processes: int | None = None,
    progress: Callable[[str, int, int], None] = lambda doing, done, all_: None,
) -> AllRanks:
    """Runs every distinct rank of the job on `processes` processes (default: one a core) and examines what they
    communicate. `progress` gets what is being done, how much of it is done, and how much there is."""
    started = time.monotonic()
    first, again = distinct_ranks(world_size, job.parallel.pipeline_parallel_size)
    # the long ones first
    tasks = [(job, card, rank, world_size, True) for rank in again]
    tasks += [(job, card, rank, world_size, False) for rank in first]
    found = _on_processes(tasks, min(len(tasks), processes or len(os.sched_getaffinity(0))), progress)
    progress("comparing", len(tasks), len(tasks))
    more, stages = found[: len(again)], found[len(again) :]
    return AllRanks(world_size, stages, more, examine(stages, more, world_size), time.monotonic() - started)


def _on_processes(tasks: list[tuple], count: int, progress: Callable[[str, int, int], None]) -> list[RankProgram]:
    """`program_of(*task)` of each task, on `count` processes that end with this one. UserError as raised there."""
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    results: dict[int, RankProgram] = {}
    waiting = iter(enumerate(tasks))
    progress("running", 0, len(tasks))
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,), daemon=True)
            process.start()
            there.close()  # so that the end of the process is the end of the pipe
            pipes.append(here)
            processes.append(process)
            here.send(next(waiting))
        busy = list(pipes)
        while busy:
            for pipe in multiprocessing.connection.wait(busy):
                assert isinstance(pipe, multiprocessing.connection.Connection)
                try:
                    number, result = pipe.recv()
                except EOFError:
                    raise RuntimeError("a process of the dry run ended without a result (out of memory?)") from None
                if isinstance(result, UserError):
                    raise result
                if isinstance(result, str):
                    raise RuntimeError(f"rank {tasks[number][2]} of the dry run failed:\n{result}")
                results[number] = result
                progress("running", len(results), len(tasks))
                task = next(waiting, None)
                if task is None:
                    busy.remove(pipe)
                else:
                    pipe.send(task)
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()
    return [results[number] for number in range(len(tasks))]


def _serve(pipe: Any) -> None:
    """Does what comes through the pipe until its other end is gone."""
    import torch

    from maniple.engines.megatron.dry_run import one_rank

    torch.set_num_threads(1)
    while True:
        try:
            number, task = pipe.recv()
        except EOFError:
            return
        try:
            result: Any = one_rank.program_of(*task)
        except UserError as error:
            result = error
        except Exception:
            result = traceback.format_exc()
        try:
            pipe.send((number, result))
        except BrokenPipeError:
            return


def as_dict(found: AllRanks) -> dict[str, Any]:
    """For `--json`: of each stage its parameters and traffic, and the faults."""
    return {
        "world_size": found.world_size,
        "ranks_a_stage": found.world_size // len(found.stages),
        "seconds": found.seconds,
        "stages": [
            {
                "pipeline_stage": stage,
                "rank": run.program.rank,
                "parameters": run.parameters,
                "micro_batches_run": run.micro_batches_run,
                "micro_batches_a_step": run.micro_batches_a_step,
                "events": len(run.program.events),
                "calls": len(run.program.calls),
                "groups": run.program.traffic(),
            }
            for stage, run in enumerate(found.stages)
        ],
        "also_run": [run.program.rank for run in found.again],
        "faults": [dataclasses.asdict(fault) | {"text": str(fault)} for fault in found.faults],
    }


def run(job: TrainConfig, card: ModelCard, world_size: int, *, as_json: bool = False) -> int:
    """Checks all ranks with a bar on standard error and prints a table, or JSON, on standard output. The exit code: 0,
    or 3 where the ranks do not fit."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("running")
        found = check(
            job,
            card,
            world_size,
            progress=lambda doing, done, all_: bar.update(task, description=doing, completed=done, total=all_),
        )
    if as_json:
        print(json.dumps(as_dict(found)))
    else:
        _print(card, found)
    return FAULTS_EXIT_CODE if found.faults else 0


# Megatron-Core's kinds of groups, by what people call them
_NAMES = {
    "tensor_model_parallel": "TP",
    "pipeline_model_parallel": "PP",
    "context_parallel": "CP",
    "data_parallel": "DP",
    "data_parallel_with_cp": "DP x CP",
    "tensor_and_context_parallel": "TP x CP",
    "tensor_and_data_parallel": "TP x DP",
    "tensor_and_data_parallel_with_cp": "TP x DP x CP",
    "model_parallel": "TP x PP",
    "expert_model_parallel": "EP",
    "expert_tensor_parallel": "ETP",
    "expert_tensor_and_model_parallel": "ETP x EP",
    "expert_data_parallel": "expert DP",
    "embedding": "embeddings",
}
_COLUMNS = 4  # kinds of groups with one of their own, those that carry most; with the others' sum they fit 100 columns


def table_of(card: ModelCard, found: AllRanks) -> Table:
    """Calls and MiB of a rank of each stage by kind of group, at most 100 columns wide."""
    traffic = [run.program.traffic() for run in found.stages]
    totals: Counter[str] = Counter()
    for of in traffic:
        for kind, sums in of.items():
            totals[kind] += sums["bytes"]
    named = [kind for kind, _ in totals.most_common() if kind in _NAMES][:_COLUMNS]
    first, size = found.stages[0], found.world_size // len(found.stages)
    passes = f"{first.micro_batches_run} of {first.micro_batches_a_step} micro-batches a step"
    table = Table(
        title=f"{card.name} on {found.world_size:,} ranks, {size:,} a pipeline stage\n"
        f"calls/MiB of a rank by group, {passes}",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    for heading in ("stage", "parameters", *(_NAMES[kind] for kind in named), "others"):
        table.add_column(heading, justify="right", no_wrap=True)
    for stage, (one, of) in enumerate(zip(found.stages, traffic, strict=True)):
        others = [sums for kind, sums in of.items() if kind not in named]
        rest = {key: sum(sums[key] for sums in others) for key in ("calls", "bytes")}
        cells = [_cell(sums) for sums in (*(of.get(kind) for kind in named), rest)]
        table.add_row(str(stage), f"{one.parameters:,}", *cells)
    return table


def _cell(sums: dict[str, int] | None) -> str:
    if not sums or not sums["calls"]:
        return ""
    size = sums["bytes"] / 2**20
    return f"{sums['calls']:,}/{size:,.{0 if size >= 100 else 1}f}"


def _print(card: ModelCard, found: AllRanks) -> None:
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else 100, markup=False, highlight=False)
    console.print(table_of(card, found))
    console.print(
        f"ranks run: one of each stage, and {', '.join(str(r.program.rank) for r in found.again)} with every pass",
        soft_wrap=True,
    )
    for fault in found.faults:
        console.print(f"fault: {fault}", soft_wrap=True)
    if found.faults:
        console.print(f"{len(found.faults)} faults: this job would hang, or exchange the wrong things")
    else:
        console.print(
            f"every group's members call the same, every message has its two ends, and all {found.world_size:,} ranks "
            f"reach the end ({found.seconds:.0f} s)",
            soft_wrap=True,
        )

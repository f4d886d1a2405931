"""`maniple plan search`: the fastest layout of a job that fits its GPUs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from maniple.commands import AsJson, check_target, file_named, given, print_table, waiting
from maniple.commands.planned import (
    EVEN_ENOUGH,
    Load,
    Measured,
    Model,
    Pods,
    gpu_named,
    job_to_plan,
    say_long,
    search_command,
)
from maniple.errors import UserError
from maniple.terminal import in_one_line


def search(
    gpus: Annotated[int, typer.Option(help="GPUs of the whole job")],
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU card: h200, mi355x, ...")],
    model: Model = None,
    config: Annotated[
        Path | None,
        typer.Option(parser=file_named, metavar="FILE", help="job file (YAML); none: the preset `pretrain`"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="override one value; of a layout's keys it stays as it is"),
    ] = None,
    global_batch_size: Annotated[
        int | None, typer.Option(help="sequences a step, over all ranks; default: 8 a GPU")
    ] = None,
    sequence_length: Annotated[int | None, typer.Option(help="tokens a sequence; default: at most 4,096")] = None,
    gpus_from: Annotated[
        int | None,
        typer.Option(help="fewest GPUs that the table goes down to, by halves; default: an eighth; --gpus: none fewer"),
    ] = None,
    imbalance: Load = EVEN_ENOUGH,
    calibration: Measured = None,
    fabric: Pods = None,
    memory_share: Annotated[
        float, typer.Option(help="of each GPU's memory that a layout may need; 0.97 keeps the error band inside")
    ] = 1.0,
    write: Annotated[
        Path | None,
        typer.Option(
            parser=file_named, metavar="FILE", help="write the best layout there, as a job for `maniple train`"
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest layout that fits: TP, PP, chunks, stages, EP, ETP, micro-batches, recomputation, CP if long."""
    from maniple.plan import search_report
    from maniple.plan.imbalance import Imbalance
    from maniple.plan.search_context import search_contexts
    from maniple.plan.search_fewer import fewer

    uneven = Imbalance.parse(imbalance)
    if not 0.01 <= memory_share <= 1:
        raise UserError(f"--memory-share {memory_share}: expected 0.01 to 1")
    card_of_gpu = gpu_named(gpu, gpus, calibration, fabric).model_copy(update={"memory_share": memory_share})
    if gpus_from is not None and not 1 <= gpus_from <= gpus:
        raise UserError(f"--gpus-from {gpus_from}: it is from 1 to --gpus {gpus}")
    if write is not None:
        check_target("--write", write)
    asked = job_to_plan(model, config, set_ or [], gpus, global_batch_size, sequence_length)
    say_long(asked.config, asked.card)
    job, card, assumed = asked.config, asked.card, asked.assumed
    with waiting("looking through layouts") as say:
        found, contexts = search_contexts(job, card, card_of_gpu, gpus, held=asked.held, imbalance=uneven, say=say)
        others = fewer(found, asked.held, gpus_from, say=say)
    if as_json:
        said = search_report.as_json(found, others) | {"contexts": search_report.contexts_as_json(contexts)}
        print(json.dumps(said | {"assumed": assumed}, indent=2))
    else:
        print(
            f"{card.name} on {gpus:,} x {card_of_gpu.name}, {job.train.global_batch_size:,} x "
            f"{job.data.sequence_length:,} tokens a step"
        )
        if assumed:
            print("assumed: " + ", ".join(f"{key}={value}" for key, value in assumed.items()))
        print(search_report.searched(found))
        if found.pareto:
            print()
            headings = search_report.HEADINGS
            numbers = [at for at, heading in enumerate(headings) if heading not in search_report.WORDS]
            table = search_report.rows(found, others)
            print_table(headings, table, numbers, search_report.spare(table))
            print(*search_report.of_fewer(found, others), "", sep="\n")
        for line in [*search_report.explanation(found), *search_report.of_contexts(contexts)]:
            print(line)
    if write is not None and found.best is None:
        raise UserError(f"--write {write}: nothing fits, so there is no job to write")
    if write is not None:
        options = given(
            ("--config", config),
            ("--calibration", calibration),
            ("--fabric", fabric),
            ("--memory-share", memory_share if memory_share < 1 else None),
            ("--global-batch-size", global_batch_size),
            ("--sequence-length", sequence_length),
            ("--imbalance", imbalance if uneven != Imbalance() else None),
            *(("--set", text) for text in set_ or []),
        )
        search_report.write_job(found, write, search_command(asked.model, gpus, gpu, options))
        print(f"maniple: {in_one_line(str(write))}: the best layout, as a job for `maniple train`", file=sys.stderr)

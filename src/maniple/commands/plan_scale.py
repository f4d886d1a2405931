"""`maniple plan scale`: a job on more and more GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from maniple.commands import AsJson, file_named, given, print_table, waiting
from maniple.commands.planned import (
    EVEN_ENOUGH,
    Load,
    Measured,
    Model,
    Pods,
    for_search,
    gpu_named,
    job_to_plan,
    one_key_each,
    say_long,
    search_command,
)
from maniple.errors import UserError


def scale(
    gpu: Annotated[str, typer.Option(metavar="NAME", help="GPU card: h200, mi355x, ...")],
    first: Annotated[int, typer.Option("--from", help="GPUs that the layout and the batch are for")],
    last: Annotated[int, typer.Option("--to", help="GPUs at most; sizes between double")],
    model: Model = None,
    config: Annotated[
        Path | None,
        typer.Option(
            parser=file_named, metavar="FILE", help="job file (YAML), whose layout is taken; none: the best at --from"
        ),
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="override one value")] = None,
    global_batch_size: Annotated[int | None, typer.Option(help="sequences a step at --from; default: 8 a GPU")] = None,
    sequence_length: Annotated[int | None, typer.Option(help="tokens a sequence; default: at most 4,096")] = None,
    imbalance: Load = EVEN_ENOUGH,
    calibration: Measured = None,
    fabric: Pods = None,
    as_json: AsJson = False,
) -> None:
    """Say how fast one layout is on more and more GPUs, with a batch that grows and with one that stays."""
    from maniple.plan import report, scaling, search_report
    from maniple.plan.imbalance import Imbalance
    from maniple.plan.search_context import search_contexts
    from maniple.plan.stages import place
    from maniple.plan.time import estimate

    uneven, card_of_gpu = Imbalance.parse(imbalance), gpu_named(gpu, calibration=calibration, fabric=fabric)
    gpus = scaling.sizes(first, last)
    asked = job_to_plan(model, config, set_ or [], first, global_batch_size, sequence_length)
    say_long(asked.config, asked.card)
    job, how = asked.config, ""
    if config is None:
        with waiting("looking through layouts") as say:
            every = search_contexts(job, asked.card, card_of_gpu, first, held=asked.held, imbalance=uneven, say=say)
        best = every[0].best
        if best is None:
            options = given(
                ("--calibration", calibration),
                ("--fabric", fabric),
                ("--global-batch-size", global_batch_size),
                ("--sequence-length", sequence_length),
                ("--imbalance", imbalance if imbalance != EVEN_ENOUGH else None),
                *(("--set", text) for text in set_ or []),
            )
            raise UserError(
                f"--from {first}: no layout of {asked.card.name} fits {first:,} x {card_of_gpu.name}; "
                f"`{search_command(asked.model, first, gpu, options)}` says what is missing"
            )
        job, how = best.config, ", " + search_report.recomputed(best.config)
    weak = scaling.scale(job, asked.card, card_of_gpu, gpus, "weak", uneven)
    strong = scaling.scale(job, asked.card, card_of_gpu, gpus, "strong", uneven)
    if as_json:
        said = {kind: [point.as_json() for point in points] for kind, points in (("weak", weak), ("strong", strong))}
        bends = [scaling.bend(points) for points in (weak, strong)]
        print(json.dumps({"model": asked.card.name, "gpu": card_of_gpu.name, **said, "bends": bends}, indent=2))
        return
    layout = report.layout_of(place(job, asked.card, first), job)
    print(f"{asked.card.name} on {first:,} to {gpus[-1]:,} x {card_of_gpu.name}: {layout}{how}")
    if asked.assumed:
        print("assumed: " + ", ".join(f"{key}={value}" for key, value in asked.assumed.items()))
    print_table(scaling.HEADINGS, scaling.rows([*weak, *strong]), range(1, 9), scaling.SPARE)
    print()
    for note in estimate(job, asked.card, card_of_gpu, first, imbalance=uneven).assumptions:
        print(note)
    for points in (weak, strong):
        print(scaling.bend(points))
    if weak[0].fits is False:
        options = for_search(config, calibration, fabric, imbalance, one_key_each(set_ or []), job)
        print(f"`{search_command(asked.model, first, gpu, options)}` looks for a layout that fits")

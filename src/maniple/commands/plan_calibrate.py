"""`maniple plan calibrate`: what this machine's own GPU attains, for plans of it."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from maniple.commands import AsJson, check_target, file_named, print_table
from maniple.commands.planned import gpu_named
from maniple.errors import UserError


def calibrate(
    out: Annotated[
        Path | None,
        typer.Option(
            parser=file_named,
            metavar="FILE",
            help="write the calibration there; default: calibration-CARD.yaml, none on a CPU",
        ),
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(metavar="NAME", help="GPU card; default: that of the GPU which torch sees")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="fewer rounds and sizes")] = False,
    device: Annotated[
        str, typer.Option(metavar="gpu|cpu", help="cpu: tiny sizes, to see the command run; no plan takes its figures")
    ] = "gpu",
    as_json: AsJson = False,
) -> None:
    """Measure this GPU for a minute; `maniple plan --calibration FILE` then takes that for its card's figures."""
    if device not in ("gpu", "cpu"):
        raise UserError(f"--device {device}: give gpu or cpu")
    if out is not None:
        check_target("--out", out)
    import torch

    if device == "gpu" and not torch.cuda.is_available():
        raise UserError("torch sees no GPU to calibrate: check the driver, or add --device cpu to see the command run")
    from maniple.bench import calibrate as measuring
    from maniple.bench.command import Progress
    from maniple.bench.rows import command_of
    from maniple.hardware.efficiency import load_efficiency

    where = torch.device("cuda" if device == "gpu" else "cpu")
    card = measuring.card_of(where, None if gpu is None else gpu_named(gpu).name)
    if out is None and card is not None:
        out = Path(f"calibration-{card.name}.yaml")
        check_target("--out", out)
    progress, began = Progress("calibrate"), time.monotonic()
    try:
        found = measuring.run(
            where, card, quick=quick, command=command_of(["maniple", *sys.argv[1:]]), progress=progress
        )
    finally:
        progress.hide()
    if out is not None:
        measuring.write(found, out)
    if as_json:
        print(json.dumps(found.model_dump(mode="json"), indent=2))
    else:
        known = load_efficiency(card.name) if card else None
        groups = ("matmul", "grouped", "attention", "memory")
        of_card = {group: getattr(known, group).shares for group in groups} if known else {}
        print_table(measuring.HEADINGS, measuring.table(found, card, of_card), numbers=[1, 2, 3, 4])
        for name, why in found.not_measured.items():
            print(f"{name} not measured: {why}")
        print()
        print(f"{found.provenance}, in {time.monotonic() - began:.0f} s")
        if card is None:
            print("a CPU: this shows that the command runs, and no plan takes it")
    if out is not None:
        print(f"maniple: {out} is written; give it to `maniple plan` as --calibration {out}", file=sys.stderr)

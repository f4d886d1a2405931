"""`maniple bench grouped-gemm`: options to a plan, rows to the reader as they come."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO

import torch
from rich.console import Console

from maniple.bench import grouped_gemm, rows
from maniple.bench.rows import Row
from maniple.bench.shapes import Shape, of_model
from maniple.errors import UserError
from maniple.models import ModelCard, load_card

GPU_TOKENS, CPU_ROWS = 8192, 256
ROUNDS, QUICK_ROUNDS = 30, 7
Run = Callable[[Callable[[str], None]], Iterable[list[Row]]]  # is told whom to tell what comes next; rows of contests


@dataclass(frozen=True)
class Options:
    """The command's options, as given."""

    model: str = "qwen3-30b-a3b"
    variant: str | None = None
    tokens: int | None = None
    rows: int | None = None
    expert_parallel_size: int = 1
    recipes: Sequence[str] = ()
    kernels: str | None = None
    device: str = "auto"
    quick: bool = False
    seed: int = 0
    as_json: bool = False
    out: Path | None = None


def main(options: Options) -> int:
    """Measures, prints and writes; 0, or 1 if one of our kernels failed or was wrong. Raises UserError for options."""
    device = device_of(options.device)
    shapes = shapes_of(options, device)
    asked = options.recipes or (["bf16"] if options.kernels else [])
    grouped_gemm.check_recipes(asked, device, options.kernels)
    plan = grouped_gemm.Plan(
        shapes,
        asked or grouped_gemm.RECIPES,
        device,
        QUICK_ROUNDS if options.quick else ROUNDS,
        options.kernels,
        options.seed,
        rows.command_of(["maniple", *sys.argv[1:]]),
    )
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(rows.create(options.out)) if options.out else None
        if device.type == "cpu":
            say("this is a CPU: the reference implementation is measured, which says nothing about the kernels' speed")
        return report(partial(grouped_gemm.run, plan), as_json=options.as_json, file=file)[1]


def report(run: Run, *, as_json: bool = False, file: IO[str] | None = None) -> tuple[list[Row], int]:
    """Runs: every row to `file` as it comes, JSON lines or tables to standard output; rows and exit code."""
    found: list[Row] = []
    current: list[Row] = []
    progress = Progress("bench")
    try:
        for contest in run(progress):
            progress.hide()
            if not found and not as_json:
                print(rows.machine(contest[0]), end="\n\n")
            for row in contest:
                if file:
                    rows.write(file, row)
                if as_json:
                    rows.write(sys.stdout, row)
            if current and not as_json and rows.shape_key(current[0]) != rows.shape_key(contest[0]):
                rows.show(current)
                current = []
            current += contest
            found += contest
    finally:  # what was measured is shown, even if the next shape does not fit or Ctrl-C ends the run
        progress.hide()
        if current and not as_json:
            rows.show(current)
    failed = [row for row in found if row["role"] == "selected" and row["failed"]]
    for row in failed:
        say(f"{row['implementation']} {row['recipe']} {row['op']} of {row['model']} {row['matrix']}: {row['not_run']}")
    return found, 1 if failed else 0


def device_of(name: str) -> torch.device:
    """auto: a GPU where torch sees one, else the CPU. Raises UserError for gpu without one."""
    if name not in ("auto", "cpu", "gpu"):
        raise UserError(f"--device {name}: give auto, cpu or gpu")
    if name == "gpu" and not torch.cuda.is_available():
        raise UserError("--device gpu and torch sees no GPU: check the driver, or leave --device out")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def card_of(model: str, variant: str | None, device: torch.device) -> ModelCard:
    """The model's card: its tiny variant on a CPU, unless `variant` is given."""
    card = load_card(model)
    variant = variant or ("full" if device.type == "cuda" else "tiny")
    if variant not in ("full", "tiny"):
        raise UserError(f"--variant {variant}: give full or tiny")
    return card.tiny() if variant == "tiny" else card


def shapes_of(options: Options, device: torch.device) -> list[Shape]:
    """The model's shapes: on a CPU of its tiny variant with few rows, unless the options say otherwise."""
    card = card_of(options.model, options.variant, device)
    if options.tokens is not None and options.rows is not None:
        raise UserError("--tokens and --rows say the same twice: rows are tokens times the experts of each; give one")
    if options.rows is not None:
        count = options.rows
    elif options.tokens is not None:
        count = options.tokens * card.moe.topk
    else:
        count = GPU_TOKENS * card.moe.topk if device.type == "cuda" else CPU_ROWS
    return of_model(card, rows=count, expert_parallel_size=options.expert_parallel_size, seed=options.seed)


class Progress:
    """What is being measured, on standard error: one line that changes on a terminal, else a line each."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._console = Console(stderr=True, markup=False, highlight=False)
        self._status = self._console.status("") if self._console.is_terminal else None

    def __call__(self, what: str) -> None:
        if self._status is None:
            self._console.print(f"{self._who}: {what}", soft_wrap=True)
        else:
            self._status.update(what)
            self._status.start()

    def hide(self) -> None:
        """Leaves the terminal to others until the next call."""
        if self._status is not None:
            self._status.stop()


def say(message: str) -> None:
    print(f"bench: {message}", file=sys.stderr)

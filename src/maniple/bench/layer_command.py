"""`maniple bench moe-layer`: options to a plan."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from maniple.bench import command, moe_layer, rows
from maniple.bench.layer_shapes import of_card
from maniple.errors import UserError

GPU_TOKENS, CPU_TOKENS = 16_384, 64


@dataclass(frozen=True)
class Options:
    """The command's options, as given."""

    model: str = "qwen3-30b-a3b"
    variant: str | None = None
    tokens: int | None = None
    expert_parallel_size: int = 1
    recipes: Sequence[str] = ()
    device: str = "auto"
    quick: bool = False
    liger: bool = True
    seed: int = 0
    as_json: bool = False
    out: Path | None = None


def main(options: Options) -> int:
    """Measures, prints and writes; 0, or 1 if one of our kernels failed or was wrong. Raises UserError for options."""
    device = command.device_of(options.device)
    gpu = device.type == "cuda"
    card = command.card_of(options.model, options.variant, device)
    tokens = options.tokens if options.tokens is not None else GPU_TOKENS if gpu else CPU_TOKENS
    for recipe in options.recipes:
        if recipe not in moe_layer.RECIPES:
            raise UserError(f"--recipe {recipe}: there is no such recipe; choose from {', '.join(moe_layer.RECIPES)}")
    plan = moe_layer.Plan(
        [of_card(card, tokens=tokens, expert_parallel_size=options.expert_parallel_size)],
        options.recipes or moe_layer.RECIPES,
        device,
        command.QUICK_ROUNDS if options.quick else command.ROUNDS,
        options.seed,
        rows.command_of(["maniple", *sys.argv[1:]]),
        options.liger,
    )
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(rows.create(options.out)) if options.out else None
        if not gpu:
            command.say("this is a CPU: the reference implementation is measured, which says nothing about the kernels")
        return command.report(partial(moe_layer.run, plan), as_json=options.as_json, file=file)[1]

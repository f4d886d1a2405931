"""A whole training step of Qwen3-30B-A3B, cut to the layers that fit one GPU: Maniple beside transformers, in turn.

    python benchmarks/whole_step.py                          # bf16, beside transformers; rows to benchmarks/results/
    python benchmarks/whole_step.py --recipe bf16 --recipe fp8_block --trace traces
    python benchmarks/whole_step.py --skip-peer --layers 6   # ours alone
    python benchmarks/whole_step.py --tiny                   # a toy on the CPU: shows that the script runs
    python benchmarks/whole_step.py --verdicts FILE...       # the verdicts of rows that were measured before

Both train in this process, one after the other, with the same layers, sequences, micro-batches and made-up tokens. An
optimizer step is timed from event to event, and the median counts; then three more are profiled. A row is written as
soon as it is measured. The exit code is 0 if all of ours ran, whatever the verdicts.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from maniple.bench import rows, whole_step
from maniple.bench.command import device_of
from maniple.bench.facts import file_name
from maniple.bench.step_ours import Ours
from maniple.bench.step_peer import Peer
from maniple.errors import UserError
from maniple.models import load_card

RESULTS = Path(__file__).parent / "results"
MODEL = "qwen3-30b-a3b"
LATE = 30.0  # seconds beyond the limit after which the process ends, wherever it is


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    options = parser().parse_args(words)
    if options.verdicts:
        report([row for file in options.verdicts for row in rows.read(file)])
        return 0
    recipes, plan = options.recipe or ["bf16"], plan_of(options, words)
    end = time.monotonic() + options.time_limit
    signal.signal(
        signal.SIGALRM, lambda number, frame: sys.exit("whole_step.py: the time is up; what was measured is kept")
    )
    signal.setitimer(signal.ITIMER_REAL, options.time_limit + LATE)
    print(
        f"{plan.card.name}, {plan.card.num_layers} layers; {plan.tokens:,} tokens a step: {plan.micro_batches} x "
        f"{plan.micro_batch_size} sequences of {plan.sequence_length:,}",
        flush=True,
    )
    found: list[rows.Row] = []
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(rows.create(out)) if (out := out_of(options, plan.device)) else None
        stack.callback(report, found)

        def keep(row: rows.Row) -> None:
            found.append(row)
            if file:
                rows.write(file, row)
            show(row)

        if not options.skip_peer:
            half = time.monotonic() + (end - time.monotonic()) / 2
            row = measured(lambda: Peer(plan), whole_step.PEER, "bf16", plan, half)
            if "OutOfMemoryError" in (row["not_run"] or ""):
                row = measured(lambda: Peer(plan, checkpointing=True), whole_step.PEER, "bf16", plan, half)
            keep(row)
        for number, recipe in enumerate(recipes):
            share = time.monotonic() + (end - time.monotonic()) / (len(recipes) - number)
            keep(measured(lambda recipe=recipe: Ours(plan, recipe), whole_step.OURS, recipe, plan, share))
    return 1 if any(row["role"] == "ours" and row["not_run"] for row in found) else 0


def measured(
    make: Callable[[], whole_step.Contestant], name: str, recipe: str, plan: whole_step.Plan, until: float
) -> rows.Row:
    """Builds a contestant, measures and ends it. One that fails, in whatever way, is a row that says so."""
    contestant = None
    try:
        contestant = make()
        row = whole_step.measure(contestant, plan, until)
    except Exception as failure:
        reason = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
        row = whole_step.absent(name, recipe, plan, reason)
    if contestant is not None:
        contestant.close()
    del contestant
    whole_step.free(plan.device)
    return row


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--layers", type=int, help="decoder layers; default: as many as fit --budget-gib")
    out.add_argument("--budget-gib", type=float, default=120.0, help="memory that the layers may take; default: 120")
    out.add_argument("--sequence-length", type=int, default=4096)
    out.add_argument("--micro-batch-size", type=int, default=2)
    out.add_argument("--micro-batches", type=int, default=4, help="forward passes a step; default: 4")
    out.add_argument("--steps", type=int, default=10, help="that are timed, after those that warm up; default: 10")
    out.add_argument("--warm-up", type=int, default=3)
    out.add_argument("--recipe", action="append", choices=["bf16", "fp8", "fp8_block", "mxfp8"], help="default: bf16")
    out.add_argument("--skip-peer", action="store_true", help="ours alone")
    out.add_argument("--time-limit", type=float, default=170.0, metavar="SECONDS", help="of it all; default: 170")
    out.add_argument("--seed", type=int, default=1234, help="of weights and tokens")
    out.add_argument("--trace", type=Path, metavar="FOLDER", help="keep the profiles, for Perfetto")
    out.add_argument("--tiny", action="store_true", help="a toy model on the CPU, without profile")
    out.add_argument("--out", type=Path, help="default: benchmarks/results/DATE-GPU-whole-step.jsonl; CPU: none")
    out.add_argument("--verdicts", type=Path, nargs="+", metavar="FILE", help="measure nothing, judge these rows")
    return out


def plan_of(options: argparse.Namespace, words: list[str]) -> whole_step.Plan:
    card = load_card(MODEL)
    device = device_of("cpu" if options.tiny else "auto")
    if device.type == "cpu" and not options.tiny:
        raise UserError("torch sees no GPU: add --tiny for a toy on the CPU")
    asked = {name: getattr(options, name) for name in ("sequence_length", "micro_batch_size", "micro_batches")}
    if options.tiny:
        card, asked = card.tiny(), {"sequence_length": 64, "micro_batch_size": 1, "micro_batches": 2}
    layers = options.layers
    if layers is None and not options.tiny:
        tokens = asked["sequence_length"] * asked["micro_batch_size"]
        recipe = "bf16" if set(options.recipe or ["bf16"]) == {"bf16"} else "fp8_block"
        layers = whole_step.fitting_layers(card, tokens, recipe, options.budget_gib * 2**30)
    if layers is not None:
        card = card.with_overrides({"num_layers": layers})
    return whole_step.Plan(
        card=card,
        **asked,
        warm_up=options.warm_up,
        steps=options.steps,
        device=device,
        seed=options.seed,
        command=rows.command_of(["python", "benchmarks/whole_step.py", *words], ("--out", "--trace")),
        trace=options.trace,
    )


def out_of(options: argparse.Namespace, device: torch.device) -> Path | None:
    if options.out is not None or device.type == "cpu":
        return options.out
    return RESULTS / file_name(device, "whole-step")


def show(row: rows.Row) -> None:
    """Prints a row as lines for people."""
    name = f"{row['implementation']} {row['recipe']}"
    if row["not_run"]:
        print(f"{name}: not run: {row['not_run']}", flush=True)
        return
    mfu = "" if row["mfu"] is None else f", {row['mfu']:.1%} MFU"
    uneven = "" if row["imbalance"] is None else f", busiest expert {row['imbalance']:.1f} x the mean"
    spread = f"{row['milliseconds_p20']:,.1f} to {row['milliseconds_p80']:,.1f}, {row['steps']} steps"
    print(
        f"{name}: {row['milliseconds']:,.1f} ms a step ({spread}), {row['tokens_per_second']:,.0f} tokens/s, "
        f"{row['tflops']:.3g} TFLOP/s{mfu}, {row['peak_memory_bytes'] / 2**30:.1f} GiB, "
        f"loss {row['first_loss']} to {row['last_loss']}{uneven}; {row['note']}"
    )
    if profile := row["profile"]:
        print(profiled(profile))
        waits = ", ".join(f"{place} {number} x" for place, number in row["host_waits"].items()) or "none"
        print(f"  the host waits at: {waits}")
    sys.stdout.flush()


def profiled(profile: dict[str, Any]) -> str:
    idle = ", ".join(f"{reason} {time:.1f} ms" for reason, time in profile["idle_milliseconds"].items())
    syncs = ", ".join(f"{name} {number:.1f}" for name, number in profile["syncs"].items()) or "none"
    lines = [
        f"  profile: {profile['step_milliseconds']:.1f} ms a step, GPU idle {profile['idle_share']:.1%} ({idle}), "
        f"{profile['long_gaps']:.0f} gaps over 10 us, longest {profile['longest_gap_milliseconds']:.2f} ms",
        f"  {profile['kernels']:,.0f} kernels, {profile['copies']:,.0f} copies, {profile['launches']:,.0f} launches; "
        f"waits of the host: {syncs}",
    ]
    lines += [
        f"    {kernel['milliseconds']:8.2f} ms {kernel['share']:6.1%} {kernel['number']:7.0f} x  {kernel['name'][:110]}"
        for kernel in profile["top"]
    ]
    return "\n".join(lines)


def report(found: list[rows.Row]) -> None:
    for verdict in whole_step.verdicts(found):
        print(f"  {verdict}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"whole_step.py: {error}")

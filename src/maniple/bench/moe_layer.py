"""The MoE layer benchmark: forward alone, and forward with backward, ours beside its peers; memory; where time goes."""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from maniple.bench import ceilings as attained
from maniple.bench import facts, layer_operands, timing
from maniple.bench.contender import Absent, Contender
from maniple.bench.contest import Contest, hold
from maniple.bench.layer import Layer, kernel_milliseconds, peak_bytes, saved_bytes, stage_milliseconds
from maniple.bench.layer_operands import CHOICE_BOUNDS, LAYER_BOUNDS, LayerOperands
from maniple.bench.layer_ours import Variants, ours
from maniple.bench.layer_peers import peers
from maniple.bench.layer_shapes import LayerShape
from maniple.bench.ours import OUR_BF16, format_of
from maniple.bench.rows import Row
from maniple.errors import UserError

RECIPES = ("bf16", "fp8_block", "fp8", "mxfp8")  # in the order in which they are measured
FORWARD, STEP = "layer_forward", "layer_step"
HIDDEN = 8  # GiB written before each call: some milliseconds, as the host needs to start a layer's kernels
PATIENCE = 120.0  # seconds for one contender to be ready: Liger tries many kernels at its first call
KERNELS = 24  # that a row lists at most


@dataclass(frozen=True)
class Plan:
    """What is measured. liger: it takes part at Qwen3-30B's shape. limit: seconds after which no shape begins.
    variants: of ours, at every shape, as `layer_ours.ours` says; else all at the first, and few at the others, since
    each shape compiles its kernels anew."""

    shapes: Sequence[LayerShape]
    recipes: Sequence[str]
    device: torch.device
    rounds: int
    seed: int
    command: str
    liger: bool = True
    limit: float = float("inf")
    variants: Variants | None = None


def run(plan: Plan, progress: Callable[[str], None]) -> Iterator[list[Row]]:
    """Yields the rows of one contest after the other, bf16 of all shapes first; `progress` is told what comes next.

    Raises UserError at the end if a shape was left out: it did not fit, or the time was up.
    """
    end = time.monotonic() + plan.limit
    about = facts.of_run(plan.device, plan.seed, plan.command, ("transformers", "liger-kernel"))
    progress("measuring dense products and copies")
    ceilings = attained.measure(plan.device, rounds=plan.rounds)
    left_out = []
    for recipe in plan.recipes:
        for shape in plan.shapes:
            name = f"{shape.model} {shape.tokens:,} tokens {recipe}"
            if time.monotonic() > end:
                left_out.append(f"{name}: the time was up")
                continue
            progress(f"{name}: filling the operands")
            _free(plan.device)
            try:
                for found in _measured(plan, recipe, shape, ceilings, progress):
                    yield [row | about for row in found]
            except (UserError, torch.OutOfMemoryError) as error:  # the next shape may fit
                left_out.append(f"{name}: {' '.join(str(error).split())[:200]}")
    if left_out:
        raise UserError(f"left out: {'; '.join(left_out)}")


def _measured(
    plan: Plan,
    recipe: str,
    shape: LayerShape,
    ceilings: attained.Ceilings,
    progress: Callable[[str], None],
) -> Iterator[list[Row]]:
    o = LayerOperands(shape, plan.device, plan.seed)
    entrants = list(ours(recipe, o, plan.variants or ("all" if shape == plan.shapes[0] else "few")))
    if recipe == "bf16":
        entrants += peers(o, liger=plan.liger and o.shape.model.startswith("qwen3-30b-a3b"))
        baseline = None
    else:
        baseline = next((e for e in ours("bf16", o, "selected") if isinstance(e, Layer)), None)
    layers = {e.name: e for e in entrants if isinstance(e, Layer)}
    for op in (FORWARD, STEP):
        progress(f"{o.shape.model} {o.shape.tokens:,} tokens {recipe} {op}")
        contest = _contest(op, recipe, o, entrants, baseline)
        found = hold(contest, ceilings, plan.device, plan.rounds)
        o.forget()  # what was expected is no part of anyone's memory, but should leave room
        for row in found:
            layer = layers.get(row["implementation"])
            profiled = row["implementation"] in [e.name for e in entrants[:2]] and plan.device.type == "cuda"
            row |= _more(op, layer if row["milliseconds"] is not None else None, o, profiled)
        for row in found:
            row["peak_ratios"] = _peak_ratios(row, found)
        yield found


def _contest(
    op: str, recipe: str, o: LayerOperands, entrants: Sequence[Layer | Absent], baseline: Layer | None
) -> Contest:
    layers = {e.name: e for e in entrants if isinstance(e, Layer)}

    def contender(layer: Layer, name: str) -> Contender:
        return Contender(name, layer.role, _call(op, layer, o), note=layer.note)

    def error(contender: Contender) -> float:
        layer = layers[contender.name]
        with within(PATIENCE):
            found, ids_TK = layer.results(o.grad_TD if op == STEP else None)
        missed, bound = o.misrouted(ids_TK), CHOICE_BOUNDS[layer.logits]
        if not missed <= bound:
            raise ValueError(f"a logit left out is larger than a chosen one by {missed:.1e}, and {bound:.1e} may be")
        return float(torch.tensor(list(layer_operands.errors(found, o.expected(ids_TK)).values())).max())

    try:
        format = format_of(recipe, o.device, None)
    except UserError:  # the entrants say so
        format = "bf16"
    used = ("grouped_gemm", "permute", "routing", "swiglu") + (() if recipe == "bf16" else ("quantize",))
    return Contest(
        op,
        recipe,
        o.shape,
        [contender(e, e.name) if isinstance(e, Layer) else e for e in entrants],
        o.shape.flops * (3 if op == STEP else 1),
        0.0,
        format,
        used,
        error,
        LAYER_BOUNDS[recipe],
        [] if baseline is None else [contender(baseline, OUR_BF16)],
        "moe-layer",
        HIDDEN,
    )


def _call(op: str, layer: Layer, o: LayerOperands) -> Callable[[], object]:
    return partial(layer.step, o.grad_TD) if op == STEP else layer.forward_only


def _more(op: str, layer: Layer | None, o: LayerOperands, profiled: bool) -> Row:
    """Memory and stages of a layer that ran, from runs of their own."""
    row: Row = {"peak_bytes": None, "saved_bytes": None, "stages": {}, "kernels": []}
    if layer is None:
        return row
    call = _call(op, layer, o)
    row["peak_bytes"] = peak_bytes(call, o.device)
    if op == STEP:
        row["saved_bytes"] = saved_bytes(layer, o.device)
        if layer.stages:
            row["stages"] = stage_milliseconds(layer, o.grad_TD, _hide(o.device))
        if layer.stages and profiled:
            row["kernels"] = [list(each) for each in kernel_milliseconds(call, o.device)[:KERNELS]]
    return row


def _peak_ratios(row: Row, found: Sequence[Row]) -> dict[str, float]:
    if row["role"] == "peer" or not row["peak_bytes"]:
        return {}
    return {
        other["implementation"]: other["peak_bytes"] / row["peak_bytes"]
        for other in found
        if other["role"] == "peer" and other["peak_bytes"]
    }


def _hide(device: torch.device) -> Callable[[], object]:
    if device.type != "cuda":
        return lambda: None
    flush = torch.empty(timing.FLUSH_BYTES, dtype=torch.uint8, device=device)
    return lambda: [flush.zero_() for _ in range(HIDDEN)]


def _free(device: torch.device) -> None:
    """The last shape's tensors, which hooks hold in cycles."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in what takes longer, as soon as it comes back to Python. In a main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(signal_number: int, frame: object) -> None:
        raise TimeoutError(f"not ready after {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds, 5.0)  # again, where someone has caught the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)

"""A whole training step, Maniple's engine beside transformers: what is run, how it is timed, what a row says of it."""

from __future__ import annotations

import collections
import gc
import itertools
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from maniple.bench import step_trace
from maniple.bench.facts import of_run
from maniple.bench.rows import Row
from maniple.bench.timing import Times
from maniple.errors import UserError
from maniple.hardware import lookup
from maniple.kernels import sources
from maniple.metrics.summary import peak_memory_bytes
from maniple.models import counting, flops
from maniple.models.card import ModelCard

BENCHMARK = "whole-step"
OURS, PEER = "maniple", "transformers"
BAR_SPEED = 1.4  # times the peer's tokens a second, in bf16
BAR_IDLE = 0.03  # of a step
PROFILED = 3  # steps
_PARAMETER_BYTES = 2 + 4 + 4 + 8  # bf16, its gradient, main parameter and moments
_QUANTIZED_BYTES = 2  # both orientations in 8 bits, of layers in low precision
_SLACK = 6 * 2**30  # logits of a chunk, what lives within one layer's backward pass, and the allocator's rounding


@dataclass(frozen=True)
class Plan:
    """What is measured. card: with the layers that are run. micro_batches: forward passes an optimizer step, each of
    `micro_batch_size` sequences. trace: a folder for traces, None: none is kept."""

    card: ModelCard
    sequence_length: int
    micro_batch_size: int
    micro_batches: int
    warm_up: int
    steps: int
    device: torch.device
    seed: int
    command: str
    trace: Path | None = None

    @property
    def tokens(self) -> int:
        """An optimizer step's."""
        return self.sequence_length * self.micro_batch_size * self.micro_batches


class Contestant(Protocol):
    """Somebody's training. step: one optimizer step; its loss (nats a token, a scalar) need not be ready on return."""

    name: str
    recipe: str
    note: str

    def step(self) -> torch.Tensor | float: ...

    def facts(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


def batches(plan: Plan) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and labels, int64 `[B, S]` in host memory, page-locked for a GPU: made up, the same for everyone."""
    generator = torch.Generator().manual_seed(plan.seed)
    while True:
        shape = plan.micro_batch_size, plan.sequence_length + 1
        ids = torch.randint(plan.card.vocab_size, shape, generator=generator)
        tokens, labels = ids[:, :-1].contiguous(), ids[:, 1:].contiguous()
        yield (tokens.pin_memory(), labels.pin_memory()) if plan.device.type == "cuda" else (tokens, labels)


def fitting_layers(card: ModelCard, tokens: int, recipe: str, budget: float) -> int:
    """Decoder layers that Maniple trains on one GPU in `budget` bytes with micro-batches of `tokens`, by a rough count
    from above: all that a layer makes in bf16 is kept. Raises UserError if not one fits."""
    count = counting.count(card)
    of_layer = sum(count.layers[-1].values())
    heads = (card.num_heads + 2 * card.num_kv_heads) * card.head_dim
    of_attention = 3 * card.hidden_size + 2 * heads + card.num_heads * card.head_dim
    of_experts = card.moe.topk * (2 * card.hidden_size + 3 * card.moe.expert_ffn_size)
    activations = 2 * tokens * (of_attention + of_experts)
    a_parameter = _PARAMETER_BYTES + (0 if recipe == "bf16" else _QUANTIZED_BYTES)
    largest = max(count.embedding, 2 * count.layers[-1]["routed_experts"] // 3)  # clipping copies a gradient
    fixed = _PARAMETER_BYTES * (count.embedding + count.head) + 4 * largest + _SLACK
    layers = int((budget - fixed) // (a_parameter * of_layer + activations))
    if layers < 1:
        raise UserError(f"not one layer of {card.name} fits {budget / 2**30:.0f} GiB: lower --micro-batch-size")
    return min(layers, card.num_layers)


def measure(contestant: Contestant, plan: Plan, until: float) -> Row:
    """Times its steps and profiles a few more. until: `time.monotonic()` after which no further step is begun.

    On a GPU times are between events after each step, so that nobody waits for the GPU who would not in training.
    """
    on_gpu = plan.device.type == "cuda"
    losses: list[torch.Tensor | float] = []
    for _ in range(plan.warm_up):
        losses.append(contestant.step())
    if on_gpu:
        torch.cuda.synchronize(plan.device)
        torch.cuda.reset_peak_memory_stats(plan.device)
    moments = [_moment(plan.device)]
    while len(moments) <= plan.steps and time.monotonic() < until:
        losses.append(contestant.step())
        moments.append(_moment(plan.device))
    if on_gpu:
        torch.cuda.synchronize(plan.device)
    peak = peak_memory_bytes(plan.device)
    took = [_between(*pair) for pair in itertools.pairwise(moments)]
    profile = waits = None
    if on_gpu and took and time.monotonic() < until:
        profile, waits = _profile(contestant, plan), host_waits(contestant)
    values = [float(loss) for loss in losses]
    return _row(contestant, plan, values, took, peak) | {"profile": profile, "host_waits": waits}


def _moment(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first: Any, second: Any) -> float:
    """Milliseconds."""
    return (second - first) * 1e3 if isinstance(first, float) else first.elapsed_time(second)


def _profile(contestant: Contestant, plan: Plan) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{contestant.name}-{contestant.recipe}.json"
        step_trace.record(contestant.step, PROFILED, plan.device, path)
        if plan.trace is not None:
            plan.trace.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, plan.trace)
        return step_trace.read(path)


def host_waits(contestant: Contestant) -> dict[str, int]:
    """Where the host waits for the GPU in a step, "package/file.py:line", and how often: by torch's own notices, which
    leave out what asks for a wait by name (`synchronize`)."""
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            contestant.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return places(said)


def places(said: Iterable[warnings.WarningMessage]) -> dict[str, int]:
    """Of torch's notices of waits among warnings, most frequent first."""
    found: collections.Counter[str] = collections.Counter()
    for note in said:
        if "synchronizing CUDA operation" in str(note.message):
            inside = re.split(r"/(?:site-packages|src)/", note.filename)
            place = (
                inside[-1] if len(inside) > 1 else "/".join(Path(note.filename).parts[-2:])
            )  # no folder of a machine
            found[f"{place}:{note.lineno}"] += 1
    return dict(found.most_common())


def _row(contestant: Contestant, plan: Plan, losses: list[float], took: list[float], peak: int) -> Row:
    times = Times.of(took) if took else None
    speed = plan.tokens / times.median * 1e3 if times else None
    a_token = flops.training_flops_per_token(plan.card, plan.sequence_length)
    parts = flops.forward_flops_per_token(plan.card, plan.sequence_length)
    gpu = lookup(torch.cuda.get_device_name(plan.device)) if plan.device.type == "cuda" else None
    count = counting.count(plan.card)
    return {
        "benchmark": BENCHMARK,
        "implementation": contestant.name,
        "role": "peer" if contestant.name == PEER else "ours",
        "recipe": contestant.recipe,
        "model": plan.card.name,
        "layers": plan.card.num_layers,
        "parameters": count.total,
        "active_parameters": count.active,
        "sequence_length": plan.sequence_length,
        "micro_batch_size": plan.micro_batch_size,
        "micro_batches": plan.micro_batches,
        "tokens_a_step": plan.tokens,
        "milliseconds": times and times.median,
        "milliseconds_p20": times and times.low,
        "milliseconds_p80": times and times.high,
        "steps": len(took),
        "tokens_per_second": speed,
        "flops_per_token": a_token,
        "flops_share": {part: value / sum(parts.values()) for part, value in parts.items()},
        "tflops": speed and speed * a_token / 1e12,
        "mfu": speed * a_token / gpu.peak_flops("bf16") if speed and gpu else None,
        "peak_memory_bytes": peak,
        "first_loss": losses[0] if losses and losses[0] == losses[0] else None,
        "last_loss": losses[-1] if losses and losses[-1] == losses[-1] else None,
        "note": contestant.note,
        "not_run": None if times else "the time was up",
        **contestant.facts(),
        **_facts(plan),
    }


def absent(name: str, recipe: str, plan: Plan, reason: str) -> Row:
    """The row of one that could not be measured."""
    facts = {"benchmark": BENCHMARK, "implementation": name, "role": "peer" if name == PEER else "ours"}
    return facts | {"recipe": recipe, "layers": plan.card.num_layers, "not_run": reason} | _facts(plan)


def _facts(plan: Plan) -> Row:
    return {"sources": sources.digests(), **of_run(plan.device, plan.seed, plan.command, ["transformers"])}


def free(device: torch.device) -> None:
    """Gives back what the last contestant held, once nothing refers to it."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def verdicts(found: Sequence[Row]) -> Iterator[str]:
    """Lines: each run of ours over the peer, and its idle time, with what the bars of bf16 come to."""
    peer = next((row for row in found if row["role"] == "peer"), None)
    for row in found:
        if row["role"] == "peer":
            continue
        bar = f" (at least {BAR_SPEED})" if row["recipe"] == "bf16" else ""
        said = f"{row['recipe']:9} tokens a second over {PEER}"
        missing = row["not_run"] or ("not measured beside it" if peer is None else peer["not_run"])
        if missing or peer is None:
            yield f"{said}: not shown{bar}: {missing}"
        else:
            ratio = row["tokens_per_second"] / peer["tokens_per_second"]
            yield f"{said}: {ratio:.2f}{bar}{_holds(ratio >= BAR_SPEED) if bar else ''}"
        said, profile = f"{row['recipe']:9} idle time of a step", row.get("profile")
        if profile is None:
            yield f"{said}: not shown (at most {BAR_IDLE:.0%}): no profile"
        else:
            idle = profile["idle_share"]
            yield f"{said}: {idle:.1%} (at most {BAR_IDLE:.0%}){_holds(idle <= BAR_IDLE)}"


def _holds(is_so: bool) -> str:
    return ": holds" if is_so else ": fails"

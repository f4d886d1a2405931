"""What a profiler's trace says of a training step: how long the GPU works, what it waits for, what takes longest.

Read from a Chrome trace as torch.profiler exports it, times there in microseconds. No torch but in `record`.
"""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from maniple.errors import UserError

MARK_BYTES = 12_347  # a copy of so many bytes on the device stands before the first step and after each
TOP = 15  # kernels that are named
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_OF_HOST = ("cuda_runtime", "cuda_driver")
_LONG_GAP = 10.0  # microseconds


@dataclass(frozen=True)
class Span:
    """Of one piece of work on the GPU or one call of the host. number: what ties a call to the work it launched."""

    name: str
    start: float
    end: float
    number: int | None
    moved: int | None = None  # bytes of a copy


def record(step: Callable[[], object], steps: int, device: Any, path: Path) -> None:
    """Runs `step` once, since the profiler begins slowly, then `steps` times between marks; writes the trace. GPU."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    source = torch.zeros(MARK_BYTES, dtype=torch.uint8, device=device)
    mark = torch.empty_like(source)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        mark.copy_(source)
        for _ in range(steps):
            step()
            mark.copy_(source)
        torch.cuda.synchronize(device)
    profiler.export_chrome_trace(str(path))


def read(path: Path) -> dict[str, Any]:
    """The figures of a trace that `record` wrote: see `figures`. Raises UserError for a trace without its marks."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return figures(_spans(events, _ON_GPU), _spans(events, _OF_HOST))


def _spans(events: Iterable[dict[str, Any]], categories: Sequence[str]) -> list[Span]:
    found = []
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in categories:
            start, told = float(event["ts"]), event.get("args", {})
            end = start + float(event["dur"])
            found.append(Span(event["name"], start, end, told.get("correlation"), told.get("bytes")))
    return sorted(found, key=lambda span: (span.start, span.end))


def figures(gpu: Sequence[Span], host: Sequence[Span]) -> dict[str, Any]:
    """Of the steps between the marks, per step. Times in milliseconds, shares of 1.

    busy_share: of the time in which at least one kernel or copy ran. Idle time by its reason:

    - after_sync: the host had waited for the GPU, so that it launched what comes next when nothing was left to do;
    - launch: the host launched it that late for another reason, its own work in between;
    - queued: it had been launched before and began late all the same: it waited for another stream, or for its turn.

    kernels, copies: pieces of work. syncs: calls by which the host waits, by name. long_gaps: idle times of more than
    10 microseconds. top: the kernels that take most, each with its time, number and share of all work.
    """
    marks = [span for span in gpu if span.moved == MARK_BYTES]
    if len(marks) < 2:
        raise UserError("the trace has not the copies that steps are told by: record it with maniple.bench.step_trace")
    steps, begin, end = len(marks) - 1, marks[0].end, marks[-1].end
    work = [span for span in gpu if begin <= span.start < end and span.moved != MARK_BYTES]
    gaps = _gaps([*work, *marks[1:]], begin)
    idle = _by_reason(gaps, host)
    total, busy = end - begin, end - begin - sum(until - since for since, until, _ in gaps)
    kernels = [span for span in work if span.moved is None and not span.name.startswith("Mem")]
    per_step = 1e-3 / steps
    calls = [call for call in host if begin <= call.start < end]
    syncs = collections.Counter(call.name for call in calls if _waits(call))
    return {
        "steps": steps,
        "step_milliseconds": total * per_step,
        "busy_share": busy / total,
        "idle_share": 1 - busy / total,
        "idle_milliseconds": {reason: time * per_step for reason, time in idle.items()},
        "long_gaps": sum(until - since > _LONG_GAP for since, until, _ in gaps) / steps,
        "longest_gap_milliseconds": max((until - since for since, until, _ in gaps), default=0.0) * 1e-3,
        "kernels": len(kernels) / steps,
        "copies": (len(work) - len(kernels)) / steps,
        "launches": sum("Launch" in call.name for call in calls) / steps,
        "syncs": {name: number / steps for name, number in syncs.items()},
        "top": _top(work, steps),
    }


def _gaps(spans: Sequence[Span], begin: float) -> list[tuple[float, float, Span]]:
    """(since, until, what then began) of the times when nothing ran, whatever the streams."""
    found, reached = [], begin
    for span in sorted(spans, key=lambda span: span.start):
        if span.start > reached:
            found.append((reached, span.start, span))
        reached = max(reached, span.end)
    return found


def _by_reason(gaps: Sequence[tuple[float, float, Span]], host: Sequence[Span]) -> dict[str, float]:
    launched: dict[int | None, Span] = {c.number: c for c in host if c.number is not None and not _waits(c)}
    waits = [call for call in host if _waits(call)]
    idle = dict.fromkeys(("after_sync", "launch", "queued"), 0.0)
    at = 0
    for since, until, span in gaps:
        while at < len(waits) and waits[at].end < since:
            at += 1
        call = launched.get(span.number)
        if call is not None and call.start < since:
            idle["queued"] += until - since
        elif at < len(waits) and waits[at].end <= until and waits[at].start <= since:
            idle["after_sync"] += until - since
        else:
            idle["launch"] += until - since
    return idle


def _waits(call: Span) -> bool:
    return "Synchronize" in call.name or call.name in ("cudaMemcpy", "hipMemcpy")


def _top(work: Sequence[Span], steps: int) -> list[dict[str, Any]]:
    found: dict[str, list[float]] = {}
    for span in work:
        found.setdefault(span.name, []).append(span.end - span.start)
    total = sum(map(sum, found.values()))
    longest = sorted(found.items(), key=lambda entry: -sum(entry[1]))[:TOP]
    return [
        {
            "name": name[:160],
            "milliseconds": sum(times) / steps * 1e-3,
            "number": len(times) / steps,
            "share": sum(times) / total,
        }
        for name, times in longest
    ]

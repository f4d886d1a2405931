"""Times of calls that take turns: what slows one round down (clocks, heat, a neighbour) slows all of them down."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

FLUSH_BYTES = 2**30  # more than any cache; filling it also hides what a call costs the host before its kernel starts
WARM_UP = 3


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call's rounds: median and the fifths next to it on both sides (20 % and 80 %)."""

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, milliseconds: list[float]) -> Times:
        ordered = sorted(milliseconds)
        last = len(ordered) - 1
        return cls(statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)], len(ordered))


def interleaved(
    calls: Mapping[str, Callable[[], object]], device: torch.device, rounds: int, hidden: int = 1
) -> dict[str, Times]:
    """Times every call `rounds` times, one after the other in each round.

    On a GPU caches hold none of a call's operands when it begins, and the events around each call are read after the
    last round: the host never waits in between. hidden: how often the gigabyte is written, for calls of many kernels.
    """
    for call in calls.values():
        for _ in range(WARM_UP if device.type == "cuda" else 1):
            call()
    if device.type != "cuda":
        took: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                took[name].append((time.perf_counter() - start) * 1e3)
        return {name: Times.of(each) for name, each in took.items()}

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(hidden):
                flush.zero_()
            pair[0].record()
            call()
            pair[1].record()
            events[name].append(pair)
    torch.cuda.synchronize(device)
    return {name: Times.of([start.elapsed_time(end) for start, end in pairs]) for name, pairs in events.items()}

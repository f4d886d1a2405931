"""Times of calls that take turns: what slows one turn down (clocks, heat, a neighbour) slows all of them down."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

FLUSH_BYTES = 2**30  # more than any cache; filling it also hides what a call costs the host before its kernel starts
WARM_UP = 3
BURST = 30.0  # milliseconds
TURNS = 5  # at least, each after another neighbour


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
    """Times every call `rounds` times or more, in turns: on a CPU one call a turn, on a GPU a burst of them.

    On a GPU caches hold none of a call's operands when it begins, and the events around each call are read after the
    last turn: the host never waits in between. A burst lasts `BURST` milliseconds, after a third as many calls that do
    not count: so a call runs at the clock that its own power allows, as it would in training. What its predecessor left
    of heat and power lasts longer than that, and so there are `TURNS` or more, whose order is drawn anew, the same in
    every run. hidden: how often the gigabyte is written, for calls of many kernels.
    """
    order, draw = list(calls), random.Random(0)
    for call in calls.values():
        for _ in range(WARM_UP if device.type == "cuda" else 1):
            call()
    if device.type != "cuda":
        took: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            draw.shuffle(order)
            for name in order:
                start = time.perf_counter()
                calls[name]()
                took[name].append((time.perf_counter() - start) * 1e3)
        return {name: Times.of(each) for name, each in took.items()}

    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
    bursts = {name: _burst(call, device, rounds) for name, call in calls.items()}
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    turn, least = 0, min(TURNS, rounds)
    while turn < least or any(len(pairs) < rounds for pairs in events.values()):
        turn += 1
        draw.shuffle(order)
        for name in order:
            if turn > least and len(events[name]) >= rounds:
                continue
            uncounted = -(-bursts[name] // 3)
            for number in range(uncounted + bursts[name]):
                for _ in range(hidden):
                    flush.zero_()
                pair = _event(), _event()
                pair[0].record()
                calls[name]()
                pair[1].record()
                if number >= uncounted:
                    events[name].append(pair)
    torch.cuda.synchronize(device)
    return {name: Times.of([start.elapsed_time(end) for start, end in pairs]) for name, pairs in events.items()}


def _burst(call: Callable[[], object], device: torch.device, rounds: int) -> int:
    """Calls that last `BURST` milliseconds, `rounds` at most."""
    start, end = _event(), _event()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize(device)
    return min(rounds, math.ceil(BURST / max(start.elapsed_time(end), 1e-3)))


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)

"""A simulated pipeline as a Chrome trace, which chrome://tracing and ui.perfetto.dev open."""

from __future__ import annotations

from maniple.plan.schedules import Slot
from maniple.plan.simulator import Simulation

_NAMES = {"F": "forward", "B": "backward", "W": "weight gradient"}


def trace_events(simulation: Simulation) -> dict:
    """The trace as plain data: a row a rank, a slice a slot, and a counter of micro-batches in flight. Microseconds."""
    events: list[dict] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": f"pipeline, {simulation.schedule.name}"}}
    ]
    for rank, spans in enumerate(simulation.spans):
        events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"rank {rank}"}})
        for span in spans:
            events.append(
                {
                    "ph": "X",
                    "pid": 0,
                    "tid": rank,
                    "ts": span.start * 1e6,
                    "dur": (span.end - span.start) * 1e6,
                    "name": " + ".join(map(str, span.slot)),
                    "cat": _category(span.slot),
                    "args": {
                        "micro_batch": [task.micro_batch for task in span.slot],
                        "stage": [simulation.schedule.stages[rank][task.chunk] for task in span.slot],
                    },
                }
            )
        for time, held in simulation.in_flight(rank):
            args = {f"chunk {chunk}": number for chunk, number in enumerate(held)}
            events.append({"ph": "C", "pid": 0, "ts": time * 1e6, "name": f"in flight, rank {rank}", "args": args})
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _category(slot: Slot) -> str:
    return " + ".join(_NAMES[task.kind] for task in slot)

"""One op, recipe and shape: every contender is checked, then all are timed in turns, and each becomes a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from maniple.bench.ceilings import Ceilings
from maniple.bench.contender import Absent, Contender
from maniple.bench.rows import Row
from maniple.bench.timing import Times, interleaved
from maniple.kernels import sources


class Measured(Protocol):
    """A shape: `facts` are the fields by which a row names it."""

    @property
    def model(self) -> str: ...
    @property
    def matrix(self) -> str: ...
    def facts(self, multiple: int = 1) -> Row: ...


@dataclass(frozen=True)
class Contest:
    """What is computed and by whom.

    flops, moved: operations, and the least bytes read and written. format: whose dense peak bounds it. used: the ops
    whose sources a figure depends on. error: of a contender's result, relative; above `bound` it is wrong and has no
    time. baselines: timed beside the others for their ratios alone. hidden: GiB written before each timed call, for
    about as long as the host needs to start it.
    """

    op: str
    recipe: str
    shape: Measured
    entrants: Sequence[Contender | Absent]
    flops: float
    moved: float
    format: str
    used: Sequence[str]
    error: Callable[[Contender], float | None]
    bound: float
    baselines: Sequence[Contender] = ()
    benchmark: str = "grouped-gemm"
    hidden: int = 1


def hold(contest: Contest, ceilings: Ceilings, device: torch.device, rounds: int) -> list[Row]:
    """Rows of all entrants in their order; those that did not run have the reason and no time."""
    errors: dict[str, float | None] = {}
    reasons: dict[str, str] = {}
    for entrant in contest.entrants:
        if isinstance(entrant, Absent):
            reasons[entrant.name] = entrant.reason
            continue
        try:
            errors[entrant.name] = error = contest.error(entrant)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        except Exception as failure:  # a peer may fail in any way, and is then a row that says so
            reasons[entrant.name] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            continue
        if error is not None and not error <= contest.bound:  # NaN is wrong too
            reasons[entrant.name] = f"wrong: its error is {error:.1e}, and {contest.bound:.1e} is the bound"
    running = [e for e in contest.entrants if isinstance(e, Contender) and e.name not in reasons]
    calls = {e.name: e.call for e in [*running, *(contest.baselines if running else ())]}
    times = interleaved(calls, device, rounds, contest.hidden) if calls else {}
    return [
        _row(contest, e, ceilings, errors.get(e.name), reasons.get(e.name), times, running) for e in contest.entrants
    ]


def _row(
    contest: Contest,
    entrant: Contender | Absent,
    ceilings: Ceilings,
    error: float | None,
    reason: str | None,
    times: dict[str, Times],
    running: Sequence[Contender],
) -> Row:
    time = None if reason else times[entrant.name]
    multiple = entrant.multiple if isinstance(entrant, Contender) else 1
    floor = ceilings.floor(contest.flops, contest.moved, contest.format)
    beside = [e.name for e in running if e.role in ("peer", "ceiling")]
    beside += [e.name for e in contest.baselines]
    compares = time is not None and entrant.role in ("selected", "alternative")
    return {
        "benchmark": contest.benchmark,
        "op": contest.op,
        "recipe": contest.recipe,
        **contest.shape.facts(multiple),
        "implementation": entrant.name,
        "role": entrant.role,
        "milliseconds": time and time.median,
        "milliseconds_p20": time and time.low,
        "milliseconds_p80": time and time.high,
        "rounds": time and time.rounds,
        "tflops": contest.flops / time.median / 1e9 if time and contest.flops else None,
        "gb_per_s": contest.moved / time.median / 1e6 if time and contest.moved else None,
        "floor_milliseconds": floor and floor[0],
        "floor_of": floor and floor[1],
        "floor_share": floor[0] / time.median if floor and time else None,
        "peak_tflops": ceilings.flops_per_s.get(contest.format, 0.0) / 1e12 or None,
        "copy_gb_per_s": ceilings.copy / 1e9,
        "ratios": {name: times[name].median / time.median for name in beside} if compares and time else {},
        "error": error if error is None or error == error else None,
        "note": entrant.note if isinstance(entrant, Contender) else "",
        "not_run": reason,
        "failed": reason is not None and isinstance(entrant, Contender),
        "sources": {op: sources.digest(op) for op in contest.used},
    }

"""The same job on fewer GPUs: what a half of them would do, a quarter, and so on, with the same batch.

Fewer GPUs take longer a step, mostly by less than their number says: pipelines have more micro-batches to fill them,
and data-parallel groups are smaller. That ends where they have to compute again what they cannot keep, or nothing fits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from maniple.errors import UserError
from maniple.hardware.units import binary_size
from maniple.plan import states
from maniple.plan.search import Costed, Found, search

# shares of a GPU's memory below which the best layout is looked for, beside the best of all
CEILINGS = (0.8, 0.6)
SHARE = 8  # the fewest GPUs, where nobody says: an eighth
WORK = 400_000  # simulated passes after which no further number is looked at: some 5 s, and clocks would differ


@dataclass(frozen=True)
class Fewer:
    """On `world_size` GPUs. found: None where no layout is legal, or none was looked for; why: what is then wrong, or
    what does not fit."""

    world_size: int
    found: Found | None
    why: str = ""


def fewer(
    found: Found,
    held: Collection[str],
    least: int | None = None,
    *,
    say: Callable[[str], None] = lambda part: None,
) -> list[Fewer]:
    """What a plain search says of the job of `found` on a half of its GPUs, a quarter, ... down to `least` (an eighth):
    without integer programs and overlapped exchange, and CP is that of the best. held: as for `search`. say: told
    what is looked at.

    It ends where nothing fits, or after `WORK`; numbers that are no whole nodes are left out. None are looked for if
    nothing of `found` fits.
    """
    out: list[Fewer] = []
    work = 0
    for number in _halves(found, least) if found.best is not None else ():
        if isinstance(number, Fewer):
            out.append(number)
            continue
        if work > WORK:
            out.append(Fewer(number, None, "not looked at after so many layouts of more GPUs: ask for that number"))
            break
        say(f"{number:,} GPUs")
        try:
            here = search(
                found.bounds.config,
                found.card,
                found.gpu,
                number,
                held=held,
                imbalance=found.bounds.imbalance,
                ceilings=CEILINGS,
                runner_up=False,
                refine_rows=False,
                program=False,
                overlap=False,
                known=found.bounds,
            )
        except UserError as error:  # of fewer still some may be legal, such as those that divide the batch
            out.append(Fewer(number, None, str(error)))
            continue
        out.append(Fewer(number, here, _missing(here)))
        work += here.work
        if here.best is None:
            break
    return out


def _halves(found: Found, least: int | None) -> Iterator[int | Fewer]:
    number, node = found.world_size, found.gpu.gpus_per_node
    least = max(1, number // SHARE) if least is None else least
    while number >= 2 * least:
        if number % 2:
            yield Fewer(number, None, "no half of that")
            return
        number //= 2
        yield Fewer(number, None, f"no whole nodes of {node}") if number > node and number % node else number


def _missing(found: Found) -> str:
    if found.nearest is None:
        return ""
    nearest = found.nearest
    hosted = sum(nearest.memory.states[kind] for kind in states.hosted(nearest.config))
    offload = ""
    if nearest.config.optimizer.offload_fraction < 1 and nearest.memory.total - hosted <= found.ceiling:
        offload = " (with --set optimizer.offload_fraction=1 it would fit: search with that)"
    return (
        f"nothing fits without integer programs: the smallest needs {binary_size(nearest.memory.total)} of "
        f"{binary_size(found.ceiling)}{offload}; fewer are not tried"
    )


def table(found: Found, others: Sequence[Fewer]) -> list[Costed]:
    """Layouts of all numbers of GPUs, most GPUs and fewest seconds first, but for those beside which another, on as few
    GPUs and with as little memory, takes no longer."""
    every = [*found.pareto, *(one for other in others if other.found for one in other.found.pareto)]
    return [one for one in every if not any(_is_beaten(one, other) for other in every)]


def _is_beaten(one: Costed, other: Costed) -> bool:
    """With the same batch, seconds a step are the whole job's tokens a second, and TGS is these a GPU."""
    mine, its = ((costed.where.world_size, costed.memory.total, costed.time.seconds) for costed in (one, other))
    return its != mine and all(new <= old for new, old in zip(its, mine, strict=True))


def has_most_tgs(one: Costed, rows: Sequence[Costed]) -> bool:
    """Whether no other row on as few GPUs and with as little memory has as many tokens a second and GPU."""
    return not any(
        other.where.world_size <= one.where.world_size
        and other.memory.total <= one.memory.total
        and other.tgs >= one.tgs
        for other in rows
        if other is not one
    )

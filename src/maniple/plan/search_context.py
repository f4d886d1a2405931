"""Context parallelism in a search: layouts at each size of it, where sequences are long or too much for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Collection

from maniple.config.schema import TrainConfig
from maniple.errors import UserError
from maniple.hardware.card import GPU
from maniple.models.card import ModelCard
from maniple.plan.imbalance import Imbalance
from maniple.plan.search import CEILINGS, Found, search

KEY = "parallel.context_parallel_size"
LONG = 32_768  # tokens a sequence from which it is tried though something fits without


def search_contexts(
    config: TrainConfig,
    card: ModelCard,
    gpu: GPU,
    world_size: int,
    *,
    held: Collection[str] = (),
    imbalance: Imbalance | None = None,
    say: Callable[[str], None] = lambda part: None,
) -> tuple[Found, dict[int, Found]]:
    """The best that `search` finds, and what it finds by size: the job's own, and its doubles until one is slower.

    Larger sizes are tried for sequences of `LONG` tokens, or where nothing fits and states alone would; never if `held`
    has the key. say: told what is looked at. Raises UserError if no layout of the job's own size is legal.
    """

    def at(size: int, *, whole: bool = True) -> Found:
        """whole: with all that is done for a winner, which sizes need not have that are only compared."""
        say(f"CP {size}")
        parallel = config.parallel.model_copy(update={"context_parallel_size": size})
        job = config.model_copy(update={"parallel": parallel})
        ceilings = CEILINGS if whole else ()
        return search(
            *(job, card, gpu, world_size),
            held=held,
            imbalance=imbalance,
            ceilings=ceilings,
            program=whole,
            overlap=whole,
        )

    size, length = config.parallel.context_parallel_size, config.data.sequence_length
    is_long = length >= LONG
    best, chosen = at(size, whole=KEY in held or not is_long), size
    found = {size: best}
    if KEY in held or (not is_long and (best.best is not None or not _states_fit(best))):
        return best, found
    while world_size % (2 * size) == 0 and length % (4 * size) == 0:  # a rank has two parts of a sequence
        size *= 2
        try:
            found[size] = at(size, whole=False)
        except UserError:  # none is legal, and none of the next will be
            break
        if not _better(found[size], best):
            if best.best is not None:
                break
            continue
        best, chosen = found[size], size
    found[chosen] = at(chosen)
    return found[chosen], found


def _states_fit(found: Found) -> bool:
    return found.nearest is not None and sum(found.nearest.memory.states.values()) < found.ceiling


def _better(one: Found, other: Found) -> bool:
    """Whether one is faster, or fits where the other does not, or lacks less where neither does."""
    if one.best is not None and other.best is not None:
        return one.best.time.seconds < other.best.time.seconds
    if one.best is not None or other.best is not None:
        return one.best is not None
    return one.nearest is not None and (other.nearest is None or one.nearest.memory.total < other.nearest.memory.total)

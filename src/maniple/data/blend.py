"""Which dataset each sample of a blend comes from: the same at every length of the run, and never a sample off.

After any n samples each dataset has given within one sample of weight x n, which drawing at random or taking whoever
is furthest behind does not keep. The weights become slots of one period, whole numbers that add up to it, and the
period's order is the solution of Tijdeman's chairman assignment problem (R. Tijdeman, "The chairman assignment
problem", 1980): sample j of a dataset may be taken once 1/(2k - 2) of it is due and must be taken before that much is
left of being one late; earliest deadline first then keeps every window. k: datasets.

The period repeats, so that any sample is found without going through those before it, and a longer run only appends.
"""

from __future__ import annotations

import heapq
import math
import re
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from maniple.errors import UserError

_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|[+-]?(nan|inf|infinity)", re.IGNORECASE)
LONGEST_PERIOD = 1 << 20
_SHORTEST_ROUNDED_PERIOD = 1 << 10
_SLOTS_OF_THE_SMALLEST = 50  # rounding then changes the smallest weight by less than 2%


def parse_blend(items: list[str], what: str) -> list[tuple[str, Fraction | None]]:
    """`[a, b]` or `[0.7, a, 0.3, b]` as (prefix, weight or None) pairs. UserError for anything between."""
    pairs: list[tuple[str, Fraction | None]] = []
    weight: Fraction | None = None
    for item in items:
        value = number(item)
        if value is not None and weight is None:
            if not (value > 0 and math.isfinite(value)):
                raise UserError(f"{what}: weight {item} must be a positive number; leave out what is not to be read")
            weight = Fraction(item)
        elif value is not None:
            raise UserError(f"{what}: weight {item} follows a weight; write [0.7, PREFIX, 0.3, PREFIX]")
        else:
            pairs.append((item.removesuffix(".bin").removesuffix(".idx"), weight))
            weight = None
    if weight is not None:
        raise UserError(f"{what}: no prefix follows the last weight; write [0.7, PREFIX, 0.3, PREFIX]")
    if len({weight is None for _, weight in pairs}) > 1:
        raise UserError(f"{what}: give every prefix a weight, or none")
    return pairs


def period_slots(weights: Sequence[Fraction]) -> list[int]:
    """Slots of each dataset in one period: exact where the weights have a common denominator up to `LONGEST_PERIOD`.

    Others are rounded to slots that add up (largest remainders first); a weight so small that it gets no slot gives 0,
    which the caller must refuse. weights: positive, of any sum.
    """
    total = sum(weights, Fraction(0))
    shares = [weight / total for weight in weights]
    period = math.lcm(*(share.denominator for share in shares))
    if period > LONGEST_PERIOD:
        needed = math.ceil(_SLOTS_OF_THE_SMALLEST / min(shares))
        period = min(max(1 << (needed - 1).bit_length(), _SHORTEST_ROUNDED_PERIOD), LONGEST_PERIOD)
    slots = [math.floor(share * period) for share in shares]
    remainders = [share * period - count for share, count in zip(shares, slots, strict=True)]
    for index in sorted(range(len(slots)), key=lambda i: (-remainders[i], i))[: period - sum(slots)]:
        slots[index] += 1
    return slots


class Blend:
    """The order of datasets that have `slots` samples each in a period (all positive)."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = list(slots)
        self.period = sum(slots)
        self._datasets = _order(self.slots)
        self._before = np.empty(self.period, np.int64)
        for dataset, count in enumerate(self.slots):
            self._before[self._datasets == dataset] = np.arange(count)

    def __call__(self, index: int) -> tuple[int, int]:
        """(dataset, which of its samples) of sample `index` of the blend."""
        cycle, slot = divmod(index, self.period)
        dataset = int(self._datasets[slot])
        return dataset, cycle * self.slots[dataset] + int(self._before[slot])

    def count(self, dataset: int, samples: int) -> int:
        """How many of the first `samples` come from `dataset`."""
        cycles, rest = divmod(samples, self.period)
        return cycles * self.slots[dataset] + int(np.count_nonzero(self._datasets[:rest] == dataset))


def _order(slots: list[int]) -> np.ndarray:
    """int32[period]: the dataset of each slot."""
    period, among = sum(slots), 2 * len(slots) - 2
    if not among:
        return np.zeros(period, np.int32)

    def window(dataset: int, taken: int) -> tuple[int, int]:
        """First and last slot, from 1, of sample `taken` of a dataset."""
        each = among * slots[dataset]
        return -(-(1 + among * taken) * period // each), ((among - 1 + among * taken) * period) // each + 1

    out = np.empty(period, np.int32)
    waiting = [(*window(dataset, 0), dataset, 0) for dataset in range(len(slots))]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    for slot in range(1, period + 1):
        while waiting and waiting[0][0] <= slot:
            _, last, dataset, taken = heapq.heappop(waiting)
            heapq.heappush(ready, (last, dataset, taken))
        last, dataset, taken = heapq.heappop(ready)
        if slot > last:
            raise AssertionError(f"slot {slot}: dataset {dataset} is late ({slots})")
        out[slot - 1] = dataset
        if taken + 1 < slots[dataset]:
            heapq.heappush(waiting, (*window(dataset, taken + 1), dataset, taken + 1))
    return out


def number(text: str) -> float | None:
    """A number as it is written, in plain digits, or None for other text."""
    return float(text) if _NUMBER.fullmatch(text) else None

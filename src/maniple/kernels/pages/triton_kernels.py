"""The page kernels: Triton's language alone, no torch, so that another framework can launch them.

Free pages stand in a ring, int32 `[P]`; a pool's state, int64, says where the first of them is and how many there are,
how many pages are held by someone, and the most that ever were. A table, int32, has how many pages were wanted and how
many there were, and then these. `take_kernel` and `give_kernel` are one program each, and all four run in the order of
one stream: nothing here is atomic.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def take_kernel(ring_ptr, state_ptr, used_ptr, table_ptr, P, LINE, PAGE, most, NUMBERS: tl.constexpr):
    """Wants the pages of `used * LINE` words, and writes the table `[2 + most]`: -1 where there is no page."""
    first, free = tl.load(state_ptr), tl.load(state_ptr + 1)
    wanted = (tl.load(used_ptr).to(tl.int64) * LINE + PAGE - 1) // PAGE
    got = tl.minimum(wanted, free)
    for n0 in range(0, most, NUMBERS):
        numbers = n0 + tl.arange(0, NUMBERS)
        pages = tl.load(ring_ptr + (first + numbers) % P, mask=numbers < got, other=-1)
        tl.store(table_ptr + 2 + numbers, pages, mask=numbers < most)
    tl.store(table_ptr, wanted.to(tl.int32))
    tl.store(table_ptr + 1, got.to(tl.int32))
    held = tl.load(state_ptr + 2) + wanted
    most_held = tl.maximum(tl.load(state_ptr + 3), held)
    tl.store(state_ptr, (first + got) % P)
    tl.store(state_ptr + 1, free - got)
    tl.store(state_ptr + 2, held)
    tl.store(state_ptr + 3, most_held)


@triton.jit
def give_kernel(ring_ptr, state_ptr, table_ptr, P, most, NUMBERS: tl.constexpr):
    """The table's pages are free again, behind all that are."""
    wanted, got = tl.load(table_ptr).to(tl.int64), tl.load(table_ptr + 1).to(tl.int64)
    first, free, held = tl.load(state_ptr), tl.load(state_ptr + 1), tl.load(state_ptr + 2)
    for n0 in range(0, most, NUMBERS):
        numbers = n0 + tl.arange(0, NUMBERS)
        mine = numbers < got
        pages = tl.load(table_ptr + 2 + numbers, mask=mine, other=0)
        tl.store(ring_ptr + (first + free + numbers) % P, pages, mask=mine)
    tl.store(state_ptr + 1, free + got)
    tl.store(state_ptr + 2, held - wanted)


@triton.jit
def _places(used_ptr, unit, words, LINES, PAGE, ONE: tl.constexpr, WORDS: tl.constexpr):
    """Where this program's words stand in the page, where in the lines, and whether they are of one."""
    within = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    packed = tl.program_id(0).to(tl.int64) * PAGE + within
    if ONE:  # what is behind the front is copied too, to the end of its page
        return within, packed, (within < PAGE) & (packed < words)
    front = tl.maximum(tl.load(used_ptr).to(tl.int64) * unit, 1)
    line = packed // front
    return within, line * words + packed % front, (within < PAGE) & (line < LINES)


@triton.jit
def store_kernel(
    data_ptr, x_ptr, used_ptr, table_ptr, unit, words, LINES, PAGE, ONE: tl.constexpr, WORDS: tl.constexpr
):
    """data `[., PAGE]`: the first `used * unit` of the `words` words of each line, packed. One page a program, or less.

    ONE: there is one line.
    """
    number = tl.program_id(0)
    if number < tl.load(table_ptr + 1):
        page = tl.load(table_ptr + 2 + number).to(tl.int64)
        within, places, mask = _places(used_ptr, unit, words, LINES, PAGE, ONE, WORDS)
        x = tl.load(x_ptr + places, mask=mask)
        tl.store(data_ptr + page * PAGE + within, x, mask=mask)


@triton.jit
def load_kernel(
    data_ptr, out_ptr, used_ptr, table_ptr, unit, words, LINES, PAGE, ONE: tl.constexpr, WORDS: tl.constexpr
):
    """The way back; zeros for what had no page. Words behind the front are left alone, or anything where ONE."""
    number = tl.program_id(0)
    if number < tl.load(table_ptr):
        there = number < tl.load(table_ptr + 1)
        page = tl.load(table_ptr + 2 + number, mask=there, other=0).to(tl.int64)
        within, places, mask = _places(used_ptr, unit, words, LINES, PAGE, ONE, WORDS)
        x = tl.load(data_ptr + page * PAGE + within, mask=mask & there, other=0)
        tl.store(out_ptr + places, x, mask=mask)

"""Oracle of pages: a ring of free pages, and copies of the used front of a buffer's lines, in plain torch.

Shapes are static and the host reads nothing. What is copied is masked, not skipped, so that the time is that of the
whole buffer.
"""

from __future__ import annotations

import torch

FIRST, FREE, HELD, MOST = range(4)  # of a pool's state
WANTED, GOT, PAGES = 0, 1, 2  # of a table: two numbers, then the pages


def take(ring_P: torch.Tensor, state: torch.Tensor, used: torch.Tensor, line: int, page: int, most: int):
    """See `maniple.kernels.pages.keep`: the table int32 `[2 + most]`; ring and state move on."""
    size = max(int(ring_P.shape[0]), 1)
    wanted = (used.reshape(()).to(torch.int64) * line + page - 1) // page
    got = torch.minimum(wanted, state[FREE])
    number_M = torch.arange(most, device=state.device)
    pages_M = torch.where(number_M < got, ring_P[(state[FIRST] + number_M) % size], -1)
    state[FIRST] = (state[FIRST] + got) % size
    state[FREE] -= got
    state[HELD] += wanted
    torch.maximum(state[MOST], state[HELD], out=state[MOST])
    return torch.cat([torch.stack([wanted, got]), pages_M]).to(torch.int32)


def give(ring_P: torch.Tensor, state: torch.Tensor, table: torch.Tensor) -> None:
    """The pages of a table are free again, behind all that are."""
    size = max(int(ring_P.shape[0]), 1)
    number_M = torch.arange(table.shape[0] - PAGES, device=state.device)
    mine_M = number_M < table[GOT]
    # where there is no page the ring's element is written as it is: `where_M` has each at most once
    where_M = (state[FIRST] + state[FREE] + number_M) % size
    where_M = torch.where(mine_M, where_M, size)
    longer = torch.cat([ring_P, ring_P.new_zeros(1)])
    longer[where_M] = table[PAGES:]
    ring_P.copy_(longer[:size])
    state[FREE] += table[GOT]
    state[HELD] -= table[WANTED]


def store(data_P: torch.Tensor, x_LW: torch.Tensor, used: torch.Tensor, unit: int, table: torch.Tensor) -> None:
    """Copies the first `used * unit` words of each line, packed, to the table's pages."""
    most, page = table.shape[0] - PAGES, data_P.shape[1]
    packed = _packed(x_LW, used, unit, most * page)
    chunks_MW = packed.view(most, page)
    mine_M = torch.arange(most, device=table.device) < table[GOT]
    # the last page of the data is no one's: it takes what has no page
    data_P[torch.where(mine_M, table[PAGES:], data_P.shape[0] - 1).to(torch.int64)] = chunks_MW


def load(data_P: torch.Tensor, out_LW: torch.Tensor, used: torch.Tensor, unit: int, table: torch.Tensor) -> None:
    """What `store` copied, back in its lines; zeros for what had no page."""
    most = table.shape[0] - PAGES
    mine_M = torch.arange(most, device=table.device) < table[GOT]
    chunks_MW = torch.where(mine_M[:, None], data_P[torch.where(mine_M, table[PAGES:], 0).to(torch.int64)], 0)
    packed = chunks_MW.flatten()
    lines, words = out_LW.shape
    front = used.reshape(()).to(torch.int64) * unit
    if lines == 1:
        out_LW[0] = packed[:words]
        return
    within_W = torch.arange(words, device=table.device)
    at_LW = torch.arange(lines, device=table.device)[:, None] * front + within_W
    there_W = within_W < front
    out_LW.copy_(torch.where(there_W, packed[torch.where(there_W, at_LW, 0)], out_LW))


def _packed(x_LW: torch.Tensor, used: torch.Tensor, unit: int, length: int) -> torch.Tensor:
    """The fronts of the lines one after the other, and anything behind them, `[length]`."""
    lines, words = x_LW.shape
    if lines == 1:
        return torch.nn.functional.pad(x_LW[0], (0, length - words))
    front = (used.reshape(()).to(torch.int64) * unit).clamp(min=1)
    at = torch.arange(length, device=x_LW.device)
    return x_LW[(at // front).clamp(max=lines - 1), (at % front).clamp(max=words - 1)]

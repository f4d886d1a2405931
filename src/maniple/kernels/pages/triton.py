"""Pages in portable Triton. The functions have the interface of `reference.py`.

Only pages that are held are copied. The host waits for nothing.
"""

from __future__ import annotations

import torch
import triton

from maniple.kernels import chips, custom_ops
from maniple.kernels.pages import launch
from maniple.kernels.pages.reference import PAGES
from maniple.kernels.pages.triton_kernels import give_kernel, load_kernel, store_kernel, take_kernel


def take(
    ring_P: torch.Tensor, state: torch.Tensor, used: torch.Tensor, line: int, page: int, most: int
) -> torch.Tensor:
    """As the reference's."""
    call = torch.ops.maniple.pages_take if custom_ops.named(ring_P) else _take
    return call(ring_P, state, used, line, page, most)


def give(ring_P: torch.Tensor, state: torch.Tensor, table: torch.Tensor) -> None:
    """As the reference's."""
    call = torch.ops.maniple.pages_give if custom_ops.named(ring_P) else _give
    call(ring_P, state, table)


def store(data_P: torch.Tensor, x_LW: torch.Tensor, used: torch.Tensor, unit: int, table: torch.Tensor) -> None:
    """As the reference's."""
    call = torch.ops.maniple.pages_store if custom_ops.named(x_LW) else _store
    call(data_P, x_LW, used, unit, table)


def load(data_P: torch.Tensor, out_LW: torch.Tensor, used: torch.Tensor, unit: int, table: torch.Tensor) -> None:
    """As the reference's."""
    call = torch.ops.maniple.pages_load if custom_ops.named(out_LW) else _load
    call(data_P, out_LW, used, unit, table)


def _take(ring_P, state, used, line: int, page: int, most: int) -> torch.Tensor:
    table, block = ring_P.new_empty(PAGES + most), launch.copy_block(chips.target(ring_P))
    size, warps = max(ring_P.shape[0], 1), block.warps
    take_kernel[(1,)](ring_P, state, used, table, size, line, page, most, NUMBERS=block.numbers, num_warps=warps)
    return table


def _give(ring_P, state, table) -> None:
    block, size = launch.copy_block(chips.target(ring_P)), max(ring_P.shape[0], 1)
    most = table.shape[0] - PAGES
    give_kernel[(1,)](ring_P, state, table, size, most, NUMBERS=block.numbers, num_warps=block.warps)


def _store(data_P, x_LW, used, unit: int, table) -> None:
    _copy(store_kernel, data_P, x_LW, used, unit, table)


def _load(data_P, out_LW, used, unit: int, table) -> None:
    _copy(load_kernel, data_P, out_LW, used, unit, table)


def _copy(kernel, data_P, lines_LW, used, unit: int, table) -> None:
    (lines, words), page, most = lines_LW.shape, data_P.shape[1], table.shape[0] - PAGES
    if not most:
        return
    block = launch.copy_block(chips.target(data_P))
    kernel[(most, triton.cdiv(page, block.words))](
        data_P,
        lines_LW,
        used,
        table,
        unit,
        words,
        lines,
        page,
        ONE=lines == 1,
        WORDS=block.words,
        num_warps=block.warps,
    )


custom_ops.define(
    "pages_take(Tensor ring, Tensor(a!) state, Tensor used, int line, int page, int most) -> Tensor",
    _take,
    lambda ring_P, state, used, line, page, most: ring_P.new_empty(PAGES + most),
)
custom_ops.define("pages_give(Tensor(a!) ring, Tensor(b!) state, Tensor table) -> ()", _give, lambda *inputs: None)
_COPY = "Tensor used, int unit, Tensor table) -> ()"
custom_ops.define(f"pages_store(Tensor(a!) data, Tensor x, {_COPY}", _store, lambda *inputs: None)
custom_ops.define(f"pages_load(Tensor data, Tensor(a!) out, {_COPY}", _load, lambda *inputs: None)

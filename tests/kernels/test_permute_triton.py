"""Every permutation kernel compiles for every GPU it is meant for: no spills, room."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import SHARED_MEMORY, TARGETS, compile_for, spills

from maniple.kernels.grouped_gemm.triton_kernels import gather_sum_kernel
from maniple.kernels.permute import launch
from maniple.kernels.permute import triton_kernels as kernels

pytestmark = pytest.mark.timeout(300)
SORT = ("ids_ptr", "ranks_ptr", "tallies_ptr", "totals_ptr", "starts_ptr", "ends_ptr", "position_ptr", "order_ptr")
WIDE = ("ids_ptr", "position_ptr", "order_ptr")


def check(target: str, kernel, arguments: dict, warps: int, **constants) -> None:
    arguments = arguments | {name: ("=", value) for name, value in constants.items()}
    compiled = compile_for(target, kernel, arguments, num_warps=warps)
    assert spills(target, compiled) == 0
    assert compiled.metadata.shared <= SHARED_MEMORY[target]


def kind(target: str) -> str:
    return "amd" if target.startswith("gfx") else "nvidia"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("experts", [128, 256, 2304])
def test_sorting(target, experts):
    block = launch.sort_block(kind(target), experts)
    arguments = {name: "*i64" if name in WIDE else "*i32" for name in SORT} | dict.fromkeys(("N", "E", "chunks"), "i32")
    warps = launch.INDEX_WARPS
    check(target, kernels.rank_kernel, arguments, warps, CHUNK=block.chunk, COLUMNS=block.columns)
    check(target, kernels.scan_kernel, arguments, warps, CHUNKS=block.chunks, EXPERTS=block.experts)
    check(target, kernels.starts_kernel, arguments, warps, WIDTH=launch.width(experts))
    check(target, kernels.place_kernel, arguments, warps, CHUNK=block.chunk)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("dtype", "columns"), [("bf16", 7168), ("fp32", 2880), ("fp32", 1)])
@pytest.mark.parametrize("topk", [1, 8, 36])
def test_rows(target, dtype, columns, topk):
    block = launch.rows_block(kind(target), columns)
    arguments = dict.fromkeys(("x_ptr", "rows_ptr", "out_ptr"), f"*{dtype}") | {"end_ptr": "*i32"}
    arguments |= dict.fromkeys(("order_ptr", "slots_ptr"), "*i64")
    arguments |= dict.fromkeys(("S", "T", "D", "x_row", "rows_row"), "i32") | dict.fromkeys(
        ("x_col", "rows_col"), ("=", 1)
    )
    if columns == 1:  # the launcher makes ones constants
        arguments |= dict.fromkeys(("D", "x_row", "rows_row"), ("=", 1))
    tile = {"ROWS": block.rows, "COLUMNS": block.columns}
    check(target, kernels.gather_kernel, arguments, block.warps, TOPK=topk, **tile)
    check(target, gather_sum_kernel, arguments, block.warps, COPIES=topk, **tile)

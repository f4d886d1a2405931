"""The recorded table of what the compiler makes for gfx950 is of today's kernels and tiles, and says what it should."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("triton")

from benchmarks import gfx950_table
from tests.kernels.compiling import SHARED_MEMORY
from tests.kernels.portable_kernels import PRODUCTS, STREAMS

ANEW = f"record it anew: {gfx950_table.COMMAND}"


@pytest.fixture(scope="module")
def rows() -> dict[str, dict]:
    table = gfx950_table.newest()
    assert table is not None, f"there is no table for gfx950: {ANEW}"
    return {row["kernel"]: row for row in map(json.loads, table.read_text(encoding="utf-8").splitlines())}


def test_it_is_of_these_sources(rows):
    assert list(rows) == [*PRODUCTS, *STREAMS], f"the table has other kernels: {ANEW}"
    stale = [name for name, row in rows.items() if row["sources"] != gfx950_table.sources()]
    assert not stale, f"the sources have changed since the table was recorded; {ANEW}"
    tiles = {name: make(gfx950_table.TARGET).tile for name, make in (PRODUCTS | STREAMS).items()}
    assert {name: row["tile"] for name, row in rows.items()} == {n: vars(t) for n, t in tiles.items()}, ANEW


def test_nothing_spills_and_products_are_native(rows):
    for name, row in rows.items():
        assert row["vgpr_spills"] == row["sgpr_spills"] == 0, name
        assert row["vgpr"] + row["agpr"] <= 512, name
        assert row["lds_bytes"] <= SHARED_MEMORY["gfx950"], name
        assert row["what"] == "compiled, not run"
        if name in PRODUCTS:
            assert row["mfma_in_main_loop"] > 0, name
            assert set(row["mfma"]) <= {"v_mfma_f32_32x32x16_bf16", "v_mfma_f32_16x16x32_bf16"}, name  # gfx950's own


def test_a_row_is_what_the_compiler_says_today(rows):
    """One kernel is compiled again: the table is no more than its rows."""
    name = "rows nk"
    assert gfx950_table.row(name, PRODUCTS[name]("gfx950")) == rows[name], ANEW


def test_the_main_loop_is_the_innermost_that_multiplies():
    assembly = """
.LBB0_1: ; outer
	v_mfma_f32_32x32x16_bf16 a, b, c, d
.LBB0_2: ; a comment
	ds_read_b128 v1, v2
	v_mfma_f32_32x32x16_bf16 a, b, c, d
	s_cbranch_scc0 .LBB0_3
	s_branch .LBB0_2
.LBB0_3:
	v_add_u32 v1, v2, v3
	s_cbranch_scc1 .LBB0_3
	s_cbranch_scc1 .LBB0_1
"""
    loop = gfx950_table.main_loop(assembly)
    assert [text.split()[0] for text in loop] == [
        "ds_read_b128",
        "v_mfma_f32_32x32x16_bf16",
        "s_cbranch_scc0",
        "s_branch",
    ]
    assert gfx950_table.main_loop(".LBB0_1:\n\tv_add_u32 v1\n\ts_branch .LBB0_1\n") == []

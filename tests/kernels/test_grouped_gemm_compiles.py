"""Every grouped GEMM kernel compiles for every GPU it is meant for: native matrix instructions, no spills, room."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import SHARED_MEMORY, TARGETS, Descriptor, compile_for, spills

from maniple.kernels.grouped_gemm import hopper, launch
from maniple.kernels.grouped_gemm import triton as portable

NATIVE = {"gfx950": "v_mfma_f32_", "gfx942": "v_mfma_f32_", "sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}
ASSEMBLY = {"gfx950": "amdgcn", "gfx942": "amdgcn", "sm_90a": "ptx", "sm_100a": "ptx"}
STRIDES = {
    "rows": ("x_row", "x_col", "w_group", "w_n", "w_k", "out_row"),
    "wgrad": ("a_row", "a_col", "b_row", "b_col", "out_group", "out_a", "out_b"),
}


def constants(tile: launch.Tile) -> dict[str, tuple]:
    return {name: ("=", getattr(tile, name.lower())) for name in ("ROWS", "COLUMNS", "DEPTH", "BAND")}


def portable_rows(target: str, nk: bool, bias: bool):
    tile = launch.rows_tile("amd" if target.startswith("gfx") else "nvidia", 2, 4096)
    descriptors = target.startswith("sm_")
    block = (1, tile.columns, tile.depth) if nk else (1, tile.depth, tile.columns)
    arguments = dict.fromkeys(("N", "K", *STRIDES["rows"]), "i32")
    # the strides of the contiguous dims are 1, which the launcher makes constants
    arguments |= {"x_col": ("=", 1), "w_k" if nk else "w_n": ("=", 1)}
    arguments |= dict.fromkeys(("x_ptr", "w_ptr", "out_ptr"), "*bf16") | {"ends_ptr": "*i32"}
    arguments |= {"bias_ptr": "*bf16", "scale_ptr": "*fp32"} if bias else {"bias_ptr": ("=", None)}
    arguments |= {} if bias else {"scale_ptr": ("=", None)}
    arguments |= {
        "x_desc": Descriptor("bf16", (tile.rows, tile.depth)) if descriptors else ("=", None),
        "w_desc": Descriptor("bf16", block) if descriptors else ("=", None),
        "out_desc": Descriptor("bf16", (tile.rows, tile.columns)) if descriptors else ("=", None),
    }
    flags = {"GROUPS": 32, "NK": nk, "DESCRIPTORS": descriptors, "BIAS": bias, "SCALE": bias, "PRECISION": "ieee"}
    arguments |= constants(tile) | {name: ("=", value) for name, value in flags.items()}
    return compile_for(target, portable.rows_kernel, arguments, num_warps=tile.warps, num_stages=tile.stages)


def portable_wgrad(target: str, accumulate: bool):
    tile = launch.wgrad_tile("amd" if target.startswith("gfx") else "nvidia", 2, 4096, accumulates=accumulate)
    descriptors = target.startswith("sm_")
    arguments = dict.fromkeys(("A", "B", *STRIDES["wgrad"]), "i32") | {"ends_ptr": "*i32"}
    arguments |= dict.fromkeys(("a_col", "b_col", "out_b"), ("=", 1))
    arguments |= {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32" if accumulate else "*bf16"}
    arguments |= {
        "a_desc": Descriptor("bf16", (tile.depth, tile.rows)) if descriptors else ("=", None),
        "b_desc": Descriptor("bf16", (tile.depth, tile.columns)) if descriptors else ("=", None),
    }
    flags = {"GROUPS": 32, "DESCRIPTORS": descriptors, "ACCUMULATE": accumulate, "PRECISION": "ieee"}
    arguments |= constants(tile) | {name: ("=", value) for name, value in flags.items()}
    return compile_for(target, portable.wgrad_kernel, arguments, num_warps=tile.warps, num_stages=tile.stages)


def check(target: str, compiled) -> None:
    assert NATIVE[target] in compiled.asm[ASSEMBLY[target]]
    assert spills(target, compiled) == 0
    assert compiled.metadata.shared <= SHARED_MEMORY[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("nk", "bias"), [(True, False), (False, False), (True, True)], ids=["nk", "kn", "bias"])
def test_portable_rows(target, nk, bias):
    check(target, portable_rows(target, nk, bias))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
def test_portable_weight_gradient(target, accumulate):
    check(target, portable_wgrad(target, accumulate))


def hopper_constants(tile: launch.Tile) -> dict[str, tuple]:
    return constants(tile) | {
        "STAGES": ("=", tile.stages),
        "LOADER": ("=", hopper._LOADER_REGISTERS),
        "CONSUMER": ("=", hopper._CONSUMER_REGISTERS),
        "num_warps": ("=", tile.warps),
    }


@pytest.mark.parametrize("columns", [4096, 128])
@pytest.mark.parametrize(("nk", "bias"), [(True, False), (False, False), (True, True)], ids=["nk", "kn", "bias"])
def test_hopper_rows(nk, bias, columns):
    tile = launch.rows_tile("hopper", 2, columns)
    block = (1, tile.columns, tile.depth) if nk else (1, tile.depth, tile.columns)
    arguments = {"N": "i32", "K": "i32", "out_row": "i32", "out_ptr": "*bf16", "ends_ptr": "*i32"}
    arguments |= {"bias_ptr": "*bf16" if bias else ("=", None), "scale_ptr": "*fp32" if bias else ("=", None)}
    arguments |= {
        "x_desc": Descriptor("bf16", (tile.rows // 2, tile.depth)),
        "w_desc": Descriptor("bf16", block),
        "out_desc": Descriptor("bf16", (tile.rows // 2, tile.columns)),
    }
    flags = {"GROUPS": 32, "NK": nk, "BIAS": bias, "SCALE": bias}
    arguments |= hopper_constants(tile) | {name: ("=", value) for name, value in flags.items()}
    check("sm_90a", compile_for("sm_90a", hopper.rows_kernel, arguments, num_warps=tile.warps))


@pytest.mark.parametrize("accumulate", [False, True], ids=["written", "added"])
def test_hopper_weight_gradient(accumulate):
    tile = launch.wgrad_tile("hopper", 2, 4096, accumulates=accumulate)
    arguments = {"A": "i32", "B": "i32", "out_ptr": "*fp32" if accumulate else "*bf16", "ends_ptr": "*i32"}
    arguments |= {
        "a_desc": Descriptor("bf16", (tile.depth, tile.rows // 2)),
        "b_desc": Descriptor("bf16", (tile.depth, tile.columns)),
        "out_desc": Descriptor("bf16", (1, 8, 64) if accumulate else (1, tile.rows // 2, tile.columns)),
    }
    arguments |= hopper_constants(tile) | {"GROUPS": ("=", 32), "ACCUMULATE": ("=", accumulate)}
    check("sm_90a", compile_for("sm_90a", hopper.wgrad_kernel, arguments, num_warps=tile.warps))

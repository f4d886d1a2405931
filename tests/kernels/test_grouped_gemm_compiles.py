"""Every grouped GEMM kernel compiles for every GPU it is meant for: native matrix instructions, no spills, room."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import SHARED_MEMORY, TARGETS, Descriptor, compile_for, spills
from tests.kernels.portable_kernels import GPT_OSS, PRODUCTS, STREAMS

from maniple.kernels.grouped_gemm import hopper, launch
from maniple.kernels.grouped_gemm.hopper_swiglu_kernels import swiglu_rows_kernel

pytestmark = pytest.mark.timeout(300)  # ptxas takes up to half a minute where other work shares the cores
NATIVE = {"gfx950": "v_mfma_f32_", "gfx942": "v_mfma_f32_", "sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}
ASSEMBLY = {"gfx950": "amdgcn", "gfx942": "amdgcn", "sm_90a": "ptx", "sm_100a": "ptx"}


def check(target: str, compiled, *, product: bool = True) -> None:
    assert (NATIVE[target] in compiled.asm[ASSEMBLY[target]]) == product
    assert spills(target, compiled) == 0
    assert compiled.metadata.shared <= SHARED_MEMORY[target]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_portable_products(name, target):
    check(target, PRODUCTS[name](target).compile())


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", STREAMS)
def test_kernels_that_only_move_rows(name, target):
    check(target, STREAMS[name](target).compile(), product=False)


def hopper_constants(tile: launch.Tile) -> dict[str, tuple]:
    return {name: ("=", value) for name, value in hopper.constants(tile).items()}


@pytest.mark.parametrize(
    "tile",
    [*launch.HOPPER_TILES, *(launch.hopper_tile(4096, depth, "nk") for depth in (4096, 7168))],
    ids=lambda tile: f"{tile.columns}-{tile.stages}-{tile.pace}",
)
@pytest.mark.parametrize(("nk", "bias"), [(True, False), (False, False), (True, True)], ids=["nk", "kn", "bias"])
def test_hopper_rows(nk, bias, tile):
    block = (1, tile.columns, tile.depth) if nk else (1, tile.depth, tile.columns)
    arguments = {"N": "i32", "K": "i32", "out_row": "i32", "out_ptr": "*bf16", "ends_ptr": "*i32"}
    arguments |= {"bias_ptr": "*bf16" if bias else ("=", None), "scale_ptr": "*fp32" if bias else ("=", None)}
    arguments["pace_ptr"] = "*i32" if tile.pace else ("=", None)
    arguments |= {
        "x_desc": Descriptor("bf16", (tile.rows // 2, tile.depth)),
        "w_desc": Descriptor("bf16", block),
        "out_desc": Descriptor("bf16", (tile.rows // 2, tile.columns // tile.parts)),
    }
    flags = {"GROUPS": 32, "NK": nk, "BIAS": bias, "SCALE": bias, "PARTS": tile.parts, "PACE": tile.pace}
    arguments |= hopper_constants(tile) | {name: ("=", value) for name, value in flags.items()}
    check("sm_90a", compile_for("sm_90a", hopper.rows_kernel, arguments, num_warps=tile.warps))


@pytest.mark.parametrize(
    ("nk", "bias", "keep", "columns"),
    [(True, True, True, 2048), (False, False, True, 2048), (True, False, False, 2048), (True, True, True, 64)],
    ids=["nk, bias", "kn", "nk, not kept", "nk, narrow"],
)
def test_hopper_rows_with_swiglu(nk, bias, keep, columns):
    tile = launch.hopper_swiglu_tile(columns)
    block = (1, 1, tile.columns, tile.depth) if nk else (1, tile.depth, 1, tile.columns)
    arguments = {"F": "i32", "K": "i32", "ends_ptr": "*i32", "probs_ptr": "*fp32"}
    arguments["pace_ptr"] = "*i32"
    arguments |= dict.fromkeys(("act_ptr", "gate_up_ptr"), "*bf16") | {"bias_ptr": "*bf16" if bias else ("=", None)}
    arguments |= dict.fromkeys(("act_desc", "gate_desc", "up_desc"), Descriptor("bf16", (tile.rows // 2, tile.columns)))
    arguments |= {"x_desc": Descriptor("bf16", (tile.rows // 2, tile.depth)), "w_desc": Descriptor("bf16", block)}
    flags = {"GROUPS": 32, "NK": nk, "BIAS": bias, "PROBS": True, "KEEP": keep, **GPT_OSS}
    flags["PACE"] = tile.pace
    arguments |= hopper_constants(tile) | {name: ("=", value) for name, value in flags.items()}
    check("sm_90a", compile_for("sm_90a", swiglu_rows_kernel, arguments, num_warps=tile.warps))


def gradient_descriptor(tile, dtype):
    return Descriptor(dtype, (1, tile.rows // 2, 64 if dtype == "fp32" else tile.columns))


@pytest.mark.parametrize("columns", [128, 4096])
@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [("bf16", False), ("fp32", False), ("fp32", True)],
    ids=["written", "written in fp32", "added"],
)
def test_hopper_weight_gradient(dtype, accumulate, columns):
    tile = launch.wgrad_tile("hopper", 2, columns, fp32=dtype == "fp32")
    arguments = {"A": "i32", "B": "i32", "ends_ptr": "*i32"}
    arguments |= {
        "a_desc": Descriptor("bf16", (tile.depth, tile.rows // 2)),
        "b_desc": Descriptor("bf16", (tile.depth, tile.columns)),
        "out_desc": gradient_descriptor(tile, dtype),
    }
    arguments |= hopper_constants(tile) | {"GROUPS": ("=", 32), "ACCUMULATE": ("=", accumulate)}
    arguments["BUFFERS"] = ("=", tile.buffers)
    kernel = compile_for("sm_90a", hopper.wgrad_kernel, arguments, num_warps=tile.warps)
    check("sm_90a", kernel)
    assert ("cp.reduce.async.bulk.tensor.3d" in kernel.asm["ptx"]) == accumulate

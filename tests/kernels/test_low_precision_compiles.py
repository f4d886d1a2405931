"""Every float8 grouped GEMM kernel compiles for every GPU it is meant for: native instructions, no spills, room."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import SHARED_MEMORY, Descriptor, compile_for, spills

from maniple.kernels.grouped_gemm import hopper_fp8, launch
from maniple.kernels.grouped_gemm import low_precision_triton as portable

# what each chip multiplies by; gfx950 takes the block-scaled instruction's plain form for float8 products of this depth
NATIVE = {
    "gfx942": {"fp8": r"v_mfma_f32_32x32x16_fp8_fp8", "fp8_block": r"v_mfma_f32_32x32x16_fp8_fp8"},
    "gfx950": {
        "fp8": r"v_mfma_f32_32x32x64_f8f6f4",
        "fp8_block": r"v_mfma_f32_32x32x64_f8f6f4",
        "mxfp8": r"v_mfma_scale_f32_32x32x64_f8f6f4",
    },
    "sm_90a": {"fp8": r"wgmma\.mma_async.*e4m3\.e4m3", "fp8_block": r"wgmma\.mma_async.*e4m3\.e4m3"},
    "sm_100a": {
        "fp8": r"tcgen05\.mma.*kind::f8f6f4",
        "fp8_block": r"tcgen05\.mma.*kind::f8f6f4",
        "mxfp8": r"tcgen05\.mma.*kind::mxf8f6f4\.block_scale",
    },
}
CASES = [(target, recipe) for target, recipes in NATIVE.items() for recipe in recipes]


def compiled(target: str, recipe: str, *, wgrad: bool, extra: bool):
    """extra: with a bias and its scale, or accumulating."""
    amd = target.startswith("gfx")
    element = "fp8e4b8" if target == "gfx942" else "fp8e4nv"
    tile = launch.low_precision_tile("amd" if amd else "nvidia", recipe, wgrad=wgrad)
    a_block, b_block = (tile.rows, tile.depth), (tile.columns, tile.depth)
    scales = "*u8" if recipe == "mxfp8" else "*fp32"
    flags = {"GROUPS": 32, "RECIPE": recipe, "DESCRIPTORS": not amd}
    if wgrad:
        kernel = portable.wgrad_kernel
        arguments = dict.fromkeys(
            ("A", "B", "P", "a_scale_row", "a_scale_block", "b_scale_row", "b_scale_block"), "i32"
        )
        arguments |= {"out_group": "i32", "out_a": "i32", "out_b": ("=", 1), "out_ptr": "*fp32" if extra else "*bf16"}
        names = ("a", "b")
        flags |= {"A_FORMAT": "e4m3", "B_FORMAT": "e4m3", "ACCUMULATE": extra}
    else:
        kernel = portable.rows_kernel
        arguments = dict.fromkeys(("N", "K", "x_scale_row", "x_scale_block", "w_scale_group", "w_scale_row"), "i32")
        arguments |= {"w_scale_block": "i32", "out_row": "i32", "out_ptr": "*bf16"}
        arguments |= {
            "bias_ptr": "*bf16" if extra else ("=", None),
            "bias_scale_ptr": "*fp32" if extra else ("=", None),
        }
        names, b_block = ("x", "w"), (1, *b_block)
        flags |= {"X_FORMAT": "e4m3", "W_FORMAT": "e4m3", "BIAS": extra, "SCALE": extra}
    # the stride that is 1 in the layout of `quantize` is a constant to the launcher
    arguments[f"{names[0]}_scale_row"] = ("=", 1)
    for name, block in zip(names, (a_block, b_block), strict=True):
        arguments |= {f"{name}_ptr": f"*{element}", f"{name}_scale_ptr": scales}
        arguments[f"{name}_desc"] = ("=", None) if amd else Descriptor(element, block)
    arguments |= {"ends_ptr": "*i32"} | {name: ("=", value) for name, value in flags.items()}
    arguments |= {name: ("=", getattr(tile, name.lower())) for name in ("ROWS", "COLUMNS", "DEPTH", "BAND")}
    return compile_for(target, kernel, arguments, num_warps=tile.warps, num_stages=tile.stages)


@pytest.mark.parametrize(("target", "recipe"), CASES)
@pytest.mark.parametrize("wgrad", [False, True], ids=["rows", "wgrad"])
@pytest.mark.parametrize("extra", [False, True], ids=["plain", "extra"])
def test_portable(target, recipe, wgrad, extra):
    kernel = compiled(target, recipe, wgrad=wgrad, extra=extra)
    assembly = kernel.asm["amdgcn" if target.startswith("gfx") else "ptx"]
    assert re.search(NATIVE[target][recipe], assembly)
    assert spills(target, kernel) == 0
    assert kernel.metadata.shared <= SHARED_MEMORY[target]


def hopper_constants(tile: launch.Tile, **flags) -> dict[str, tuple]:
    values = hopper_fp8._constants(tile) | flags | {"GROUPS": 32}
    return {name: ("=", value) for name, value in values.items()}


def check_hopper(kernel) -> None:
    assert re.search(r"wgmma\.mma_async.*m64n128k32\.f32\.e4m3", kernel.asm["ptx"])
    assert spills("sm_90a", kernel) == 0
    assert kernel.metadata.shared <= SHARED_MEMORY["sm_90a"]


@pytest.mark.parametrize("tile", launch.HOPPER_FP8_TILES, ids=lambda t: f"{t.rows}x{t.columns}-{t.stages}")
@pytest.mark.parametrize("block", [False, True], ids=["fp8", "fp8_block"])
def test_hopper_rows(tile, block):
    check_hopper(hopper_rows(tile, block))


@pytest.mark.parametrize("block", [False, True], ids=["fp8", "fp8_block"])
def test_hopper_rows_with_bias_and_wide_gradients(block):
    """Their tile; dgrad's scales of the weight are a transposed view."""
    check_hopper(hopper_rows(launch.hopper_fp8_tile(4096, block=block, bias=True), block, bias=True))
    e5m2 = hopper_rows(launch.hopper_fp8_tile(4096, block=block, bias=False), block, element="fp8e5", turned=True)
    check_hopper_mixed(e5m2)


def check_hopper_mixed(kernel) -> None:
    assert re.search(r"wgmma\.mma_async.*m64n128k32\.f32\.e5m2\.e4m3", kernel.asm["ptx"])
    assert spills("sm_90a", kernel) == 0


def hopper_rows(tile, block, *, bias=False, element="fp8e4nv", turned=False):
    arguments = dict.fromkeys(("N", "K", "x_scale_block", "w_scale_group", "w_scale_row", "w_scale_block"), "i32")
    arguments |= {"w_scale_row" if turned else "w_scale_block": ("=", 1), "out_row": "i32"}
    arguments |= {"out_ptr": "*bf16", "ends_ptr": "*i32", "x_scale_ptr": "*fp32", "w_scale_ptr": "*fp32"}
    arguments |= {"bias_ptr": "*bf16" if bias else ("=", None), "bias_scale_ptr": "*fp32" if bias else ("=", None)}
    arguments |= {
        "x_desc": Descriptor(element, (tile.rows // 2, 128)),
        "w_desc": Descriptor("fp8e4nv", (1, tile.columns, 128)),
        "out_desc": Descriptor("bf16", (tile.rows // 2, 128)),
    }
    arguments |= hopper_constants(tile, BLOCK=block, BIAS=bias, SCALE=bias)
    return compile_for("sm_90a", hopper_fp8.rows_kernel, arguments, num_warps=tile.warps)


@pytest.mark.parametrize("tile", launch.HOPPER_FP8_WGRAD_TILES, ids=lambda t: f"{t.rows}x{t.columns}-{t.stages}")
@pytest.mark.parametrize("block", [False, True], ids=["fp8", "fp8_block"])
@pytest.mark.parametrize(
    ("dtype", "accumulate"),
    [("bf16", False), ("fp32", False), ("fp32", True)],
    ids=["written", "written in fp32", "added"],
)
def test_hopper_weight_gradient(tile, block, dtype, accumulate):
    arguments = {"A": "i32", "B": "i32", "ends_ptr": "*i32"}
    arguments |= {"a_scale_ptr": "*fp32", "b_scale_ptr": "*fp32"}
    arguments |= {
        "a_desc": Descriptor("fp8e4nv", (tile.rows // 2, 128)),
        "b_desc": Descriptor("fp8e4nv", (tile.columns, 128)),
        "a_scale_desc": Descriptor("fp32", (tile.rows // 2,)),
        "b_scale_desc": Descriptor("fp32", (tile.columns,)),
        "out_desc": Descriptor(dtype, (1, 64, 64 if dtype == "fp32" else 128)),
    }
    arguments |= hopper_constants(tile, BLOCK=block, ACCUMULATE=accumulate)
    check_hopper(compile_for("sm_90a", hopper_fp8.wgrad_kernel, arguments, num_warps=tile.warps))

"""Every quantization kernel compiles for every GPU it is meant for: the chip's own casts, no spills, room.

Triton keeps the casts of the first AMD chip that a process compiled for, so that each is compiled for in a process of
its own, which runs this file with its name in `COMPILE_FOR`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import SHARED_MEMORY, compile_for, spills

from maniple.kernels.quantize import hopper_kernels, launch
from maniple.kernels.quantize import triton as kernels
from maniple.kernels.quantize.formats import RECIPES
from maniple.kernels.swiglu import hopper_kernels as swiglu_kernels

ALONE = os.environ.get("COMPILE_FOR")
TARGETS = [ALONE] if ALONE else ["sm_90a", "sm_100a"]
CASTS = {
    "gfx950": r"v_cvt_scalef32_pk_(fp8|bf8)_f32",
    "gfx942": r"v_cvt_pk_fp8_f32",
    "sm_90a": r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32",
    "sm_100a": r"cvt\.rn\.satfinite\.(e4m3|e5m2)x2\.f32",
}
ASSEMBLY = {"gfx950": "amdgcn", "gfx942": "amdgcn", "sm_90a": "ptx", "sm_100a": "ptx"}
CASES = [("fp8", "e4m3fn"), ("fp8_block", "e4m3fn"), ("mxfp8", "e4m3fn"), ("mxfp8", "e5m2"), ("fp8_block", "e4m3fnuz")]


@pytest.mark.timeout(600)
@pytest.mark.skipif(ALONE is not None, reason="is that process")
@pytest.mark.parametrize("target", ["gfx950", "gfx942"])
def test_amd(target):
    command = [sys.executable, "-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", __file__]
    run = subprocess.run(command, env=os.environ | {"COMPILE_FOR": target}, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-4000:]
    assert f"{2 * len(CASES) + 4} passed" in run.stdout


def check(target: str, kernel, arguments: dict, constants: dict) -> None:
    constants = dict(constants)
    warps, registers = constants.pop("num_warps"), constants.pop("maxnreg", None)
    arguments = arguments | {name: ("=", value) for name, value in constants.items()}
    compiled = compile_for(target, kernel, arguments, num_warps=warps, maxnreg=registers)
    assert spills(target, compiled) == 0
    assert compiled.metadata.shared <= SHARED_MEMORY[target]
    native = "WARPS" in constants or constants.get("CAST", "none") != "none"  # all of Hopper's own, or where it may
    assert bool(re.search(CASTS[target], compiled.asm[ASSEMBLY[target]])) == native


def rows(target: str, recipe: str, form: str, *, emulate: bool = False, gather: bool = False) -> None:
    out, scale = "*bf16" if emulate else "*u8", "*u8" if RECIPES[recipe].e8m0 else "*fp32"
    arguments = {"x_ptr": "*bf16", "top_ptr": "*i32", "end_ptr": "*i32", "along_ptr": out}
    arguments |= {"down_ptr": "*bf16" if emulate else "*i32"}
    arguments |= {"source_ptr": "*i32" if gather else ("=", None), "along_scale_ptr": scale, "down_scale_ptr": scale}
    arguments |= {
        "amax_ptr": ("=", None) if RECIPES[recipe].rows else "*i32",
        "K": "i32",
        "P": "i32",
        "T": "i32",
        "x_row": "i32",
    }
    arguments |= {"x_col": ("=", 1)}
    arguments |= {"along_scale_row": ("=", 1), "along_scale_col": "i32"}
    arguments |= {"down_scale_row": ("=", 1), "down_scale_col": "i32"}
    constants = launch.constants(target, recipe, form, "rceil", weight=False, emulate=emulate)
    check(target, kernels.rows_kernel, arguments, constants)


def weight(target: str, recipe: str, form: str, *, emulate: bool = False) -> None:
    arguments = {"w_ptr": "*bf16", "forward_ptr": "*bf16" if emulate else "*u8", "N": "i32", "K": "i32"}
    arguments |= {"dgrad_ptr": ("=", None) if emulate else "*i32", "w_col": ("=", 1)}
    arguments |= {"scale_ptr": "*u8" if RECIPES[recipe].e8m0 else "*fp32", "w_group": "i32", "w_row": "i32"}
    arguments |= {"amax_ptr": ("=", None) if RECIPES[recipe].weight else "*i32"}
    constants = launch.constants(target, recipe, form, "rceil", weight=True, emulate=emulate)
    check(target, kernels.weight_kernel, arguments, constants)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("recipe", "form"), CASES)
def test_rows(target, recipe, form):
    rows(target, recipe, form)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("recipe", "form"), CASES)
def test_weight(target, recipe, form):
    weight(target, recipe, form)


@pytest.mark.parametrize("target", TARGETS)
def test_emulated_rows(target):
    rows(target, "mxfp8", "e4m3fn", emulate=True)


@pytest.mark.parametrize("target", TARGETS)
def test_emulated_weight(target):
    weight(target, "mxfp8", "e4m3fn", emulate=True)


@pytest.mark.parametrize("target", TARGETS)
def test_permuted_rows(target):
    rows(target, "mxfp8", "e4m3fn", gather=True)


@pytest.mark.skipif(ALONE is not None, reason="for Hopper alone")
@pytest.mark.parametrize("groups", [8, 256])
@pytest.mark.parametrize(("recipe", "form"), [("fp8_block", "e4m3fn"), ("mxfp8", "e4m3fn"), ("mxfp8", "e5m2")])
def test_hopper_rows(recipe, form, groups):
    scale = "*u8" if RECIPES[recipe].e8m0 else "*fp32"
    arguments = {"x_ptr": "*i32", "ends_ptr": "*i32", "padded_ptr": "*i32", "along_ptr": "*i16", "down_ptr": "*i32"}
    arguments |= {"along_scale_ptr": scale, "down_scale_ptr": scale, "K": "i32", "S": "i32", "P": "i32", "x_row": "i32"}
    constants = launch.hopper_constants(groups) | launch.hopper_format(recipe, form, "rceil")
    check("sm_90a", hopper_kernels.rows_kernel, arguments, constants)


@pytest.mark.skipif(ALONE is not None, reason="for Hopper alone")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_hopper_swiglu(backward):
    kernel = swiglu_kernels.backward_kernel if backward else swiglu_kernels.forward_kernel
    arguments = {"grad_ptr": "*i32", "x_ptr": "*i32", "probs_ptr": "*fp32", "parts_ptr": "*fp32", "ends_ptr": "*i32"}
    arguments |= {"padded_ptr": "*i32", "along_ptr": "*i16", "down_ptr": "*i32"}
    arguments |= dict.fromkeys(("along_scale_ptr", "down_scale_ptr"), "*fp32")
    arguments |= dict.fromkeys(("F", "S", "P", "grad_row", "x_row"), "i32")
    constants = launch.hopper_swiglu_constants(128, "fp8_block", "e4m3fn", "rceil")
    check("sm_90a", kernel, arguments, constants | {"maxnreg": launch.HOPPER_SWIGLU_REGISTERS[backward]})


@pytest.mark.parametrize("target", TARGETS)
def test_the_largest_magnitude_and_where_groups_end(target):
    arguments = {"x_ptr": "*bf16", "source_ptr": ("=", None), "end_ptr": "*i32", "amax_ptr": "*i32", "R": "i32"}
    arguments |= {"C": "i32", "T": "i32", "x_matrix": "i32", "x_row": "i32", "x_col": ("=", 1)}
    tile = {"ROWS": launch.AMAX_ROWS, "COLUMNS": launch.AMAX_COLUMNS, "num_warps": launch.warps(target)}
    check(target, kernels.amax_kernel, arguments, tile)
    arguments = {"ends_ptr": "*i32", "padded_ptr": "*i32", "top_ptr": "*i32", "end_ptr": "*i32", "tiles": "i32"}
    groups = {"GROUPS": 256, "WIDTH": 256, "ROWS": launch.ROWS, "TILES": launch.TILES, "num_warps": 4}
    check(target, kernels.tiles_kernel, arguments, groups)

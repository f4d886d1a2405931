"""The rotary kernel compiles for every chip, without spilled registers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import TARGETS, compile_for, spills

from maniple.kernels.rope import launch
from maniple.kernels.rope.triton_kernels import rotate_kernel


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("heads", "pairs", "rest"), [(32, 64, 0), (8, 32, 64)], ids=["whole", "half of a head"])
def test_it_compiles(target, heads, pairs, rest):
    block = launch.block("amd" if target.startswith("gfx") else "nvidia", heads, pairs)
    arguments = {"x_ptr": "*bf16", "cos_ptr": "*fp32", "sin_ptr": "*fp32", "out_ptr": "*bf16", "x_d": ("=", 1)}
    arguments |= dict.fromkeys(("B", "H", "D", "R", "x_s", "x_b", "x_h"), "i32")
    arguments |= {"BACK": ("=", True), "REST": ("=", rest), "HEADS": ("=", block.heads), "PAIRS": ("=", block.pairs)}
    compiled = compile_for(target, rotate_kernel, arguments, num_warps=block.warps)
    assert spills(target, compiled) == 0

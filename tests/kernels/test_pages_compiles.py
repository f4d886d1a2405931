"""Every page kernel compiles for every GPU it is meant for: no spills, and whole vectors are copied."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import TARGETS, compile_for, spills

from maniple.kernels.pages import launch
from maniple.kernels.pages import triton_kernels as kernels

pytestmark = pytest.mark.timeout(300)


def compiled(target, kernel, words, **constants):
    block = launch.copy_block("amd" if target.startswith("gfx") else "nvidia")
    arguments = dict.fromkeys(("data_ptr", "x_ptr", "out_ptr"), f"*{words}")
    arguments |= dict.fromkeys(("ring_ptr", "table_ptr", "used_ptr"), "*i32") | {"state_ptr": "*i64"}
    arguments |= dict.fromkeys(("P", "LINE", "PAGE", "most", "unit", "words", "LINES"), "i32")
    constants |= {"NUMBERS": block.numbers, "WORDS": block.words}
    arguments |= {name: ("=", value) for name, value in constants.items()}
    return compile_for(target, kernel, arguments, num_warps=block.warps)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kernel", [kernels.take_kernel, kernels.give_kernel])
def test_allocation(target, kernel):
    assert spills(target, compiled(target, kernel, "i32")) == 0


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("words", ["i32", "u8"])
@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize("kernel", [kernels.store_kernel, kernels.load_kernel])
def test_copies(target, kernel, one, words):
    lines = {"LINES": 1} if one else {}
    done = compiled(target, kernel, words, ONE=one, **lines)
    assert spills(target, done) == 0
    if one and words == "i32":
        wide = {"g": "_dwordx4", "s": ".v4.b32"}[target[0]]
        text = done.asm["amdgcn" if target.startswith("gfx") else "ptx"]
        assert wide in text

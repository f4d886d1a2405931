"""The AdamW kernel compiles for every chip, without spilled registers, in each mix of precisions in use."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from tests.kernels.compiling import TARGETS, compile_for, spills

from maniple.kernels.adamw import launch
from maniple.kernels.adamw.triton_kernels import update_kernel

# of main parameters and of both moments
MIXES = {"bf16 moments": ("fp32", "bf16"), "bf16": ("bf16", "bf16")}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mix", MIXES)
def test_it_compiles(target, mix):
    block = launch.block("amd" if target.startswith("gfx") else "nvidia")
    main, moments = MIXES[mix]
    arguments = dict.fromkeys(("scale", "beta1", "rest1", "beta2", "rest2"), "fp32")
    arguments |= dict.fromkeys(("decay", "step_size", "root", "epsilon"), "fp32")
    arguments |= {"grad_ptr": "*fp32", "main_ptr": f"*{main}", "scale_ptr": "*fp32", "N": "i64", "key": "i32"}
    arguments |= dict.fromkeys(("exp_avg_ptr", "exp_avg_sq_ptr"), f"*{moments}")
    arguments |= {"model_ptr": "*bf16" if main == "fp32" else ("=", None), "first": "i64"}
    arguments |= {"BLOCK": ("=", block.elements)}
    compiled = compile_for(target, update_kernel, arguments, num_warps=block.warps)
    assert spills(target, compiled) == 0

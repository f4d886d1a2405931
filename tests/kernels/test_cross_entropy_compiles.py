"""The cross-entropy kernels compile for every chip, without spilled registers."""

from __future__ import annotations

import pytest
from tests.kernels.compiling import TARGETS, compile_for, spills

from maniple.kernels.cross_entropy import launch
from maniple.kernels.cross_entropy import triton_kernels as kernels

LOGITS = {"logits_ptr": "*bf16", "labels_ptr": "*i64", "lse_ptr": "*fp32", "V": "i32", "row_stride": "i32"}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("kernel", "last"), [(kernels.statistics_kernel, "target_ptr"), (kernels.gradient_kernel, "grad_ptr")]
)
def test_it_compiles(target, kernel, last):
    block = launch.block("amd" if target.startswith("gfx") else "nvidia")
    arguments = LOGITS | {last: "*fp32", "COLUMNS": ("=", block.columns)}
    compiled = compile_for(target, kernel, arguments, num_warps=block.warps)
    assert spills(target, compiled) == 0

"""What the reference of quantization passes, for the Triton kernels under Triton's interpreter, bit for bit.

The interpreter knows no cast to float8: what runs here is the kernels' own rounding. A chip's cast is tried in
`tests/gpu/test_quantize.py`.
"""

from __future__ import annotations

import functools

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels import test_quantize as suite
from tests.kernels.test_quantize import (  # noqa: F401 (collected here, with the fixture below)
    test_any_strides_and_the_same_bits_each_time,
    test_e8m0_rounding_is_the_named_one,
    test_no_rows_at_all,
    test_permuted_on_the_way,
    test_rows_past_the_groups_are_not_written,
    test_ties_go_to_the_even_number,
    test_zeros_stay_zero_with_the_smallest_scale,
)

from maniple.kernels import registry
from maniple.kernels.quantize import triton as kernels
from maniple.kernels.quantize.formats import RECIPES

pytestmark = pytest.mark.timeout(300)
assert triton.knobs.runtime.interpret, "run through test_interpreted.py"
registry.register("quantize", "interpreted", RECIPES, {"cpu"}, kernels, preference=-1)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    for name in ("quantize_rows", "quantize_weight", "emulate_rows", "emulate_weight"):
        monkeypatch.setattr(suite, name, functools.partial(getattr(suite, name), kernels="interpreted"))
    monkeypatch.setattr(suite, "FIRST", 0x80)  # the interpreter takes subnormal bf16 numbers for others


@pytest.mark.parametrize("sizes", [[5, 130, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize(("recipe", "dtype"), suite.CASES)
def test_groups(recipe, dtype, sizes):
    suite.check_rows(sizes, 136, recipe, dtype)


@pytest.mark.parametrize(("dtype", "rounding"), [(suite.E4M3, "rceil"), (suite.E5M2, "floor")])
def test_magnitudes_and_emulation(dtype, rounding):
    suite.test_every_magnitude_of_bf16(dtype, rounding)
    suite.test_emulation_has_the_values_of_mxfp8(dtype, rounding, torch.bfloat16)


@pytest.mark.parametrize(
    ("recipe", "dtype"), [("fp8", suite.FNUZ), ("fp8_block", suite.E4M3), ("mxfp8", suite.E4M3), ("mxfp8", suite.E5M2)]
)
def test_weights_and_what_is_not_finite(recipe, dtype):
    suite.test_weights_are_the_same_for_forward_and_dgrad(recipe, dtype, (2, 136, 72))
    suite.test_what_is_not_finite_makes_its_blocks_nan_and_no_other(recipe, dtype, -torch.nan)
    suite.test_what_is_not_finite_makes_its_blocks_nan_and_no_other(recipe, dtype, torch.inf)


@settings(max_examples=6, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 130), min_size=1, max_size=4),
    k=st.sampled_from([1, 31, 32, 33, 128, 200]),
    which=st.sampled_from(suite.CASES),
    rounding=st.sampled_from(["rceil", "floor"]),
)
def test_any_groups(sizes, k, which, rounding):
    suite.check_rows(sizes, k, *which, rounding=rounding)


def test_these_kernels_ran():
    suite.quantize_rows(torch.ones(1, 1), None, "mxfp8")
    assert ("quantize", "mxfp8", "cpu", "interpreted") in registry.used()

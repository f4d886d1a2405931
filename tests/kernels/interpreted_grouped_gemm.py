"""What the reference of grouped GEMM passes, for the portable Triton kernels under Triton's interpreter.

Triton decides at its import whether it interprets: `test_interpreted.py` runs this file in a process of its own. In
fp32: the interpreter multiplies the bits of bf16 numbers as integers (interpreter.py, `create_dot`).
"""

from __future__ import annotations

import functools

import pytest
import torch
import triton
from tests.kernels import test_grouped_gemm as suite
from tests.kernels.test_grouped_gemm import (  # noqa: F401 (collected here, with the fixture below)
    test_any_shape,
    test_bias_and_its_gradients,
    test_result_and_each_gradient,
    test_strided_operands,
    test_the_tail_is_zeroed_on_demand_and_only_then,
)

from maniple.kernels import registry
from maniple.kernels.grouped_gemm import grouped_gemm, reference
from maniple.kernels.grouped_gemm import triton as portable

pytestmark = pytest.mark.timeout(300)  # hypothesis runs dozens of interpreted kernels in one test
assert triton.knobs.runtime.interpret, "run through test_interpreted.py"
registry.register("grouped_gemm", "interpreted", {"bf16"}, {"cpu"}, portable, preference=-1)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(suite, "grouped_gemm", functools.partial(grouped_gemm, kernels="interpreted"))


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize(("k", "n"), [(40, 72), (37, 66)], ids=["descriptors", "pointers"])
def test_several_tiles_in_every_direction(k, n, layout):
    suite.check([5, 0, 37, 1, 20], bias=True, scale=True, k=k, n=n, tail=9, layout=layout, bound=2e-6)


@pytest.mark.parametrize("strided", [False, True])
def test_weight_gradients_are_written_or_added_once(strided):
    x_SK, _, ends_G, _, _, grad_SN = suite.case([2, 0, 35], k=24, n=40)
    once = reference.wgrad(x_SK, grad_SN, ends_G)
    out = torch.full((3, 40, 48), torch.nan)[:, :, ::2] if strided else torch.full_like(once, torch.nan)
    assert portable.wgrad(x_SK, grad_SN, ends_G, out=out) is out
    assert suite.relative_error(out, once) < 1e-6
    before = out.clone()
    portable.wgrad(x_SK, grad_SN, ends_G, out=out, accumulate=True)
    assert suite.relative_error(out - before, once) < 1e-6
    with pytest.raises(ValueError, match="pass it"):
        portable.wgrad(x_SK, grad_SN, ends_G, accumulate=True)
    with pytest.raises(ValueError, match="shape"):
        portable.wgrad(x_SK, grad_SN, ends_G, out=out[:2])


def test_these_kernels_ran():
    suite.check([3], bias=False, scale=False)
    assert ("grouped_gemm", "bf16", "cpu", "interpreted") in registry.used()

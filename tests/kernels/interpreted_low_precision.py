"""The portable float8 grouped GEMM under Triton's interpreter, against fp64 products of the same quantized operands.

Run through `test_interpreted.py`. The interpreter has no block-scaled product: mxfp8 is for a GPU to check.
"""

from __future__ import annotations

import pytest
import torch
import triton
from tests.kernels.test_low_precision import SIZES, case, check_quality, products, run

from maniple.kernels import registry
from maniple.kernels.grouped_gemm import low_precision_triton as portable
from maniple.kernels.grouped_gemm.low_precision import OP

pytestmark = pytest.mark.timeout(300)
assert triton.knobs.runtime.interpret, "run through test_interpreted.py"
registry.register(OP, "interpreted", {"fp8", "fp8_block"}, {"cpu"}, portable, preference=-1)
RECIPES = ["fp8", "fp8_block"]


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_every_kind_of_group(sizes, recipe):
    products(portable.rows, portable.wgrad, sizes, recipe, layout="nk" if recipe == "fp8" else "kn")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("k", "n"), [(144, 144), (37, 66)], ids=["descriptors", "pointers"])
def test_several_tiles_in_every_direction(recipe, k, n):
    products(portable.rows, portable.wgrad, [5, 0, 37, 1, 70], recipe, k=k, n=n)


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_size_of_a_group(recipe):
    products(portable.rows, portable.wgrad, list(range(1, 131, 43)), recipe, k=40, n=9)


@pytest.mark.parametrize("recipe", RECIPES)
def test_wide_gradients(recipe):
    products(portable.rows, portable.wgrad, [5, 37], recipe, grad_dtype=torch.float8_e5m2)


def test_quality():
    check_quality([7, 0, 3], recipe="fp8_block", k=300, n=136, kernels="interpreted")
    assert (OP, "fp8_block", "cpu", "interpreted") in registry.used()


def test_scales_of_any_strides():
    x_SK, w_G, ends_G, _, _, grad_SN = case([20, 13], k=144)
    wanted = run(x_SK, w_G, ends_G, grad_SN, recipe="fp8_block", kernels="interpreted")

    class Copied:
        bias_grad = staticmethod(portable.bias_grad)

        @staticmethod
        def rows(x, w, *args, **kwargs):
            return portable.rows(contiguous(x), contiguous(w), *args, **kwargs)

        @staticmethod
        def wgrad(grad, x, *args, **kwargs):
            return portable.wgrad(contiguous(grad), contiguous(x), *args, **kwargs)

    def contiguous(q):
        return type(q)(q.data, q.scales.contiguous(), q.block)

    registry.register(OP, "copied", {"fp8_block"}, {"cpu"}, Copied, preference=-2)
    got = run(x_SK, w_G, ends_G, grad_SN, recipe="fp8_block", kernels="copied")
    for a, b, rows in zip(got, wanted, (slice(33), slice(33), slice(None)), strict=True):
        assert torch.equal(a[rows], b[rows])

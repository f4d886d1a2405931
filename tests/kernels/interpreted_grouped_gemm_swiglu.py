"""What the references of SwiGLU and of the grouped GEMM with it pass, for the Triton kernels under the interpreter.

`interpreted_grouped_gemm.py` says why in a process of its own, and in fp32.
"""

from __future__ import annotations

import functools

import pytest
import torch
import triton
from tests.kernels import test_grouped_gemm_swiglu as suite
from tests.kernels import test_swiglu as alone
from tests.kernels.interpreted_grouped_gemm import tiles
from tests.kernels.test_grouped_gemm_swiglu import (  # noqa: F401 (collected here, with the fixture below)
    test_every_form,
    test_result_and_each_gradient,
    test_the_tail_is_zeroed_on_demand_and_only_then,
)
from tests.kernels.test_swiglu import test_gradient_of_probs_is_a_finite_difference, test_no_rows  # noqa: F401
from tests.poison import relative_error

from maniple.kernels import registry
from maniple.kernels.grouped_gemm import grouped_gemm_swiglu, launch
from maniple.kernels.grouped_gemm import triton as portable
from maniple.kernels.swiglu import reference, swiglu
from maniple.kernels.swiglu import triton as kernels

pytestmark = pytest.mark.timeout(300)
assert triton.knobs.runtime.interpret, "run through test_interpreted.py"
registry.register("grouped_gemm_swiglu", "interpreted", {"bf16"}, {"cpu"}, portable, preference=-1)
registry.register("swiglu", "interpreted", {"bf16"}, {"cpu"}, kernels, preference=-1)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    pinned = functools.partial(grouped_gemm_swiglu, kernels="interpreted")
    monkeypatch.setattr(suite, "grouped_gemm_swiglu", pinned)
    monkeypatch.setattr(alone, "swiglu", functools.partial(swiglu, kernels="interpreted"))


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
@pytest.mark.parametrize("form", [{}, alone.GPT_OSS], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("weighted", [False, True])
def test_swiglu_alone(layout, form, weighted):
    alone.test_result_and_each_gradient(layout, form, weighted)


@pytest.mark.parametrize(
    ("layout", "gate_up", "gathers"),
    [("nk", "stacked", False), ("kn", "stacked", True), ("nk", "interleaved", True), ("kn", "interleaved", False)],
)
@pytest.mark.parametrize(("k", "f"), [(24, 40), (21, 35)], ids=["descriptors", "pointers"])
def test_several_tiles_in_every_direction(k, f, layout, gate_up, gathers):
    suite.check([5, 0, 20], k=k, f=f, tail=9, layout=layout, gate_up=gate_up, gathers=gathers, bound=4e-6)


@pytest.mark.parametrize("tile", tiles(launch.rows_tile), ids=str)
def test_every_tile(tile, monkeypatch):
    monkeypatch.setattr(launch, "swiglu_tile", lambda *arguments, **more: tile)
    suite.check([5, 0, 20], k=24, f=40, tail=9, bound=4e-6)


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
@pytest.mark.parametrize("f", [16, 37], ids=["whole", "partial"])
def test_rows_past_the_groups_are_left_alone(layout, f):
    """The tail is poison before and after, without a gradient of probs. (fp32: the interpreter cuts to bf16.)"""
    g = torch.Generator().manual_seed(0)
    rows, used = 23, 9
    x, grad = (3 * torch.randn(rows, columns, generator=g) for columns in (2 * f, f))
    probs = torch.rand(rows, generator=g)
    for tensor in (x, grad, probs):
        tensor[used:] = torch.nan
    settings = dict(**alone.GPT_OSS, layout=layout)
    ends_G = torch.tensor([4, used], dtype=torch.int32)
    out = kernels.forward(x, probs, ends_G, **settings)
    grad_x, grad_probs = kernels.backward(grad, x, probs, ends_G, **settings)
    wanted = reference.backward(grad[:used], x[:used], probs[:used], **settings)
    assert out[used:].isnan().all()
    assert grad_x[used:].isnan().all()
    assert (grad_probs[used:] == 0).all()
    assert relative_error(out[:used], reference.forward(x[:used], probs[:used], **settings)) < 1e-6
    assert relative_error(grad_x[:used], wanted[0]) < 1e-6
    assert relative_error(grad_probs[:used], wanted[1]) < 1e-6


def test_nan_is_not_clamped_away():
    x = torch.tensor([[torch.nan, 1.0], [1.0, torch.nan], [1.0, 1.0]])
    for implementation in (reference, kernels):
        assert implementation.forward(x, limit=7.0).isnan().flatten().tolist() == [True, True, False]


def test_strided_operands():
    g = torch.Generator().manual_seed(0)
    x, grad = torch.randn(5, 24, generator=g), torch.randn(6, 5, generator=g).t()
    for view in (x[:, ::2], x[:, 3:15]):
        probs = torch.rand(5, 2, generator=g)[:, 0]
        assert relative_error(kernels.forward(view, probs), reference.forward(view, probs)) < 1e-6
        for got, wanted in zip(kernels.backward(grad, view, probs), reference.backward(grad, view, probs), strict=True):
            assert relative_error(got, wanted) < 1e-6
    assert kernels.backward(torch.ones(1, 1).expand(5, 6), x[:, 3:15])[0].shape == (5, 12)


def test_the_same_inputs_give_the_same_bits():
    g = torch.Generator().manual_seed(0)
    x, grad, probs = torch.randn(9, 74, generator=g), torch.randn(9, 37, generator=g), torch.rand(9, generator=g)
    for first, second in zip(*[kernels.backward(grad, x, probs) for _ in range(2)], strict=True):
        assert torch.equal(first, second)


def test_these_kernels_ran():
    suite.check([3])
    assert ("grouped_gemm_swiglu", "bf16", "cpu", "interpreted") in registry.used()
    assert ("swiglu", "bf16", "cpu", "interpreted") in registry.used()

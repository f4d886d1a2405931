"""The low-precision linear layer: quality against fp64, products against the oracle, gradients added, what is sent."""

from __future__ import annotations

import itertools

import pytest
import torch
from tests.kernels.test_low_precision import snr, values
from tests.poison import relative_error

from maniple.errors import UserError
from maniple.kernels import chips, quantize, registry
from maniple.kernels.linear import OP, choose, quantized_linear, reference, scaled_mm
from maniple.kernels.linear.grouped import Grouped
from maniple.kernels.quantize import QuantizedWeight, bump
from maniple.kernels.quantize import cache as cache_module

RECIPES = ["fp8", "fp8_block", "mxfp8"]
BF16 = 1.8e-3  # one rounding is off by 1.1e-3 in the mean


def case(*rows, k=200, n=136, rms=1.0, dtype=torch.bfloat16, seed=0):
    """x, w, bias and a gradient of the result."""
    g = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=g) * rms).to(dtype) for shape in ((*rows, k), (n, k), (n,), (*rows, n))]


def run(x, w_NK, grad, bias_N=None, **settings):
    """(out, dx, dw[, dbias]), the gradients computed twice: the second backward meets recycled memory."""
    leaves = [t.clone().requires_grad_() for t in (x, w_NK, bias_N) if t is not None]
    for _ in range(2):
        out = quantized_linear(leaves[0], leaves[1], bias_N=leaves[2] if len(leaves) > 2 else None, **settings)
        grads = torch.autograd.grad(out, leaves, grad)
    return out, *grads


def exact(x, w_NK, grad, bias_N=None):
    leaves = [t.double().requires_grad_() for t in (x, w_NK, bias_N) if t is not None]
    out = torch.nn.functional.linear(*leaves)
    return out, *torch.autograd.grad(out, leaves, grad.double())


@pytest.mark.parametrize("kernels", ["grouped", "reference"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("rms", [1.0, 1e-3, 1e-6, 1e-10])
def test_quality_at_any_magnitude(recipe, rms, kernels):
    x, w_NK, _, grad = case(3, 50, rms=rms)
    got = run(x, w_NK, grad, recipe=recipe, kernels=kernels)
    for name, a, b in zip(("out", "dx", "dw"), got, exact(x, w_NK, grad), strict=True):
        assert a.dtype == torch.bfloat16
        assert a.shape == b.shape
        assert snr(a, b) >= 25, name


@pytest.mark.parametrize("recipe", RECIPES)
def test_quality_of_wide_gradients(recipe):
    x, w_NK, _, grad = case(131)
    got = run(x, w_NK, grad, recipe=recipe, grad_dtype=torch.float8_e5m2)
    wanted = exact(x, w_NK, grad)
    assert snr(got[0], wanted[0]) >= 25
    assert all(20 <= snr(a, b) < 27 for a, b in zip(got[1:], wanted[1:], strict=True))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("rows", "k", "n"), [((1,), 1, 1), ((5, 26), 37, 66), ((129,), 144, 80), ((2, 1, 3), 64, 16)])
def test_any_shape_is_the_oracle_s(recipe, rows, k, n):
    x, w_NK, bias_N, grad = case(*rows, k=k, n=n)
    wanted = run(x, w_NK, grad, bias_N, recipe=recipe, kernels="reference")
    for a, b in zip(run(x, w_NK, grad, bias_N, recipe=recipe), wanted, strict=True):
        assert relative_error(a, b) <= BF16
    # the bias's gradient is a plain sum
    assert relative_error(wanted[3], grad.double().reshape(-1, n).sum(0)) <= 4e-3


@pytest.mark.parametrize(
    ("recipe", "implementation"), [*itertools.product(RECIPES, ["reference", "grouped"]), ("fp8", "scaled_mm")]
)
def test_products_of_the_same_quantized_values(recipe, implementation):
    """Against fp64. PyTorch's own product runs on a CPU too."""
    product = {"reference": reference, "scaled_mm": scaled_mm, "grouped": Grouped(recipe, "reference")}[implementation]
    x_SK, w_NK, bias_N, grad_SN = case(150, k=144, n=80)
    ends_G = torch.tensor([150], dtype=torch.int32)
    x, grad = (quantize.quantize_rows(t, ends_G, recipe) for t in (x_SK, grad_SN))
    w = quantize.quantize_weight(w_NK[None], recipe)
    out = product.rows(x.rowwise, w.forward, ends_G, bias_N=bias_N, out_dtype=torch.bfloat16)
    assert relative_error(out, values(x.rowwise) @ values(w.forward)[0].t() + bias_N.double()) <= BF16 * 1.5
    dx = product.rows(grad.rowwise, w.dgrad, ends_G, out_dtype=torch.bfloat16)
    assert relative_error(dx, values(grad.rowwise) @ values(w.dgrad)[0].t()) <= BF16
    wanted = values(grad.columnwise)[:, :150] @ values(x.columnwise)[:, :150].t()
    operands = grad.columnwise, x.columnwise, x.padded_ends_G
    dw = product.wgrad(*operands, out_dtype=torch.bfloat16)
    assert dw.dtype == torch.bfloat16
    assert relative_error(dw[0], wanted) <= BF16
    main_1NK = torch.ones(1, 80, 144)
    for _ in range(2):
        assert product.wgrad(*operands, out_dtype=torch.float32, out_1NK=main_1NK) is main_1NK
    assert relative_error(main_1NK[0], 1 + 2 * wanted) <= 1e-6


@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_added_to_main_grad_once_a_backward_pass(recipe):
    x, w_NK, _, grad = case(70, k=64, n=32)
    w_NK.requires_grad_()
    w_NK.main_grad = torch.ones(32, 64)
    for _ in range(3):
        out = quantized_linear(x, w_NK, recipe=recipe, fuse_wgrad_accumulation=True)
        out.backward(grad)
        assert w_NK.grad_added_to_main_grad
        assert w_NK.grad.shape == w_NK.shape
        w_NK.grad = None
    dw = run(x.float(), w_NK.detach().float(), grad.float(), recipe=recipe)[2]
    assert relative_error(w_NK.main_grad, 1 + 3 * dw.double()) <= 1e-6


@pytest.mark.parametrize("recipe", ["fp8", "fp8_block"])
def test_the_cache_is_used_and_changes_no_bit(recipe, monkeypatch):
    calls = []

    def counted(*arguments, **settings):
        calls.append(1)
        return quantize.quantize_weight(*arguments, **settings)

    monkeypatch.setattr(cache_module, "quantize_weight", counted)
    x, w_NK, _, grad = case(20)
    cache = QuantizedWeight(recipe, check=True)
    for step in range(2):
        got = run(x, w_NK.requires_grad_(), grad, recipe=recipe)
        leaf = x.clone().requires_grad_()
        for _ in range(3):
            out = quantized_linear(leaf, w_NK, recipe=recipe, weight_cache=cache)
            dx, dw = torch.autograd.grad(out, [leaf, w_NK], grad)
            assert all(torch.equal(a, b) for a, b in zip((out, dx, dw), got, strict=True))
        assert len(calls) == step + 1
        w_NK.data.mul_(-0.7)
        bump()


def test_only_what_is_needed_is_computed_and_kept():
    x, w_NK, _, grad = case(20)
    kept = []
    for needs in ((False, False), (True, False), (False, True), (True, True)):
        a, b = (t.clone().requires_grad_(need) for t, need in zip((x, w_NK), needs, strict=True))
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, into=sizes: into.append(t) or t, lambda t: t):
            out = quantized_linear(a, b, recipe="fp8_block")
        kept.append(sum(t.numel() * t.element_size() for t in sizes if t.element_size() == 1))
        if any(needs):
            out.backward(grad)
        assert [a.grad is not None, b.grad is not None] == list(needs)
    weight, rows = w_NK.numel(), 128 * x.shape[1]
    assert kept == [0, weight, rows, weight + rows]


def test_what_is_sent_and_when():
    """Gathered before all; the sum is begun before the weight's gradient is computed and awaited after."""
    x, w_NK, _, grad = case(4, 3, 5, k=64, n=32)
    said = []

    class Exchange:
        def gather(self, part):
            said.append("gather")
            return torch.cat([part, part * 2])

        def reduce(self, whole):
            said.append("reduce")
            return lambda: said.append("received") or whole[:4] + 2 * whole[4:]

    a, b = x.clone().requires_grad_(), w_NK.clone().requires_grad_()
    b.main_grad = torch.zeros(32, 64)
    kept = reference.wgrad
    try:
        reference.wgrad = lambda *operands, **settings: said.append("wgrad") or kept(*operands, **settings)
        out = quantized_linear(
            a, b, recipe="mxfp8", exchange=Exchange(), fuse_wgrad_accumulation=True, kernels="reference"
        )
        out.backward(torch.cat([grad, grad]))
    finally:
        reference.wgrad = kept
    assert said == ["gather", "reduce", "wgrad", "received"]
    whole = torch.cat([x, x * 2])
    wanted = exact(whole, w_NK, torch.cat([grad, grad]))
    assert out.shape == (8, 3, 5, 32)
    assert snr(out, wanted[0]) >= 25
    assert snr(a.grad, wanted[1][:4] + 2 * wanted[1][4:]) >= 25
    assert snr(b.main_grad, wanted[2]) >= 25


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows_give_zero_gradients(recipe):
    x, w_NK, bias_N, grad = case(0, 3, k=64, n=32)
    out, dx, dw, dbias = run(x, w_NK, grad, bias_N, recipe=recipe)
    assert out.shape == (0, 3, 32)
    assert dx.shape == x.shape
    assert (dw == 0).all()
    assert (dbias == 0).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_nan_in_x_reaches_the_result_and_the_gradient(recipe):
    x, w_NK, _, grad = case(4, k=64, n=32)
    x[2, 5] = torch.nan
    out, _, dw = run(x, w_NK, grad, recipe=recipe)
    assert out[2].isnan().all()
    assert dw[:, 5].isnan().all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_tensors_without_values_and_compiled_graphs(recipe):
    x, w_NK, _, grad = case(3, 4, k=64, n=32)
    meta = [t.to("meta") for t in (x, w_NK, grad)]
    for a, b in zip(run(*meta, recipe=recipe), run(x, w_NK, grad, recipe=recipe), strict=True):
        assert a.is_meta
        assert a.shape == b.shape
    compiled = torch.compile(
        lambda x, w: quantized_linear(x, w, recipe=recipe, kernels="grouped"), backend="aot_eager", fullgraph=True
    )
    a, b = x.clone().requires_grad_(), w_NK.clone().requires_grad_()
    out = compiled(a, b)
    out.backward(grad)
    for got, wanted in zip((out, a.grad, b.grad), run(x, w_NK, grad, recipe=recipe), strict=True):
        assert torch.equal(got, wanted)


def test_what_computes_it_is_known():
    w_NK = torch.empty(32, 64, dtype=torch.bfloat16)
    assert choose(w_NK, "fp8_block") == ("grouped", "reference")
    assert choose(w_NK, "mxfp8") == ("grouped", "emulated")
    assert choose(w_NK, "fp8", kernels="reference") == ("reference", None)
    quantized_linear(w_NK, w_NK, recipe="fp8")
    assert (OP, "fp8", "cpu", "grouped") in registry.used()


def test_torch_s_product_of_no_rows_is_zero():
    x, w_NK, _, grad = (t.detach() for t in case(0, k=64, n=32))
    ends_G = torch.zeros(1, dtype=torch.int32)
    x, grad = (quantize.quantize_rows(t, ends_G, "fp8") for t in (x, grad))
    w = quantize.quantize_weight(w_NK[None], "fp8")
    assert scaled_mm.rows(x.rowwise, w.forward, ends_G, out_dtype=torch.bfloat16).shape == (0, 32)
    dw = scaled_mm.wgrad(grad.columnwise, x.columnwise, x.padded_ends_G, out_dtype=torch.bfloat16)
    assert dw.shape == (1, 32, 64)
    assert (dw == 0).all()


def test_mistakes_are_one_line():
    x, w_NK, bias_N, _ = case(4, k=64, n=32)
    for match, call in {
        r"one dtype, not torch.float32 \[4, 64\] and torch.bfloat16": lambda: quantized_linear(
            x.float(), w_NK, recipe="fp8"
        ),
        r"x \[..., K\] and w \[N, K\]": lambda: quantized_linear(x, w_NK[None], recipe="fp8"),
        r"bias needs shape \[32\], not \[31\]": lambda: quantized_linear(x, w_NK, bias_N=bias_N[1:], recipe="fp8"),
        "needs a weight with a main_grad": lambda: quantized_linear(
            x, w_NK, recipe="fp8", fuse_wgrad_accumulation=True
        ),
        "needed in both orientations": lambda: quantized_linear(
            x.clone().requires_grad_(), w_NK, recipe="fp8", weight_cache=QuantizedWeight("fp8", dgrad=False)
        ),
    }.items():
        with pytest.raises(ValueError, match=match):
            call()
    with pytest.raises(UserError, match="cannot use scaled_mm for recipe fp8 on cpu: scaled_mm does not run on cpu"):
        quantized_linear(x, w_NK, recipe="fp8", kernels="scaled_mm")
    with pytest.raises(UserError, match="cannot run recipe bf16 on cpu"):
        quantized_linear(x, w_NK, recipe="bf16")


def test_what_torch_s_product_refuses(monkeypatch):
    e4m3, e5m2, fnuz = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz
    assert scaled_mm.refusal(torch.bfloat16, 32, 64, e4m3, e5m2) is None
    assert "multiples of 16, and they are 64 and 33" in scaled_mm.refusal(torch.bfloat16, 33, 64, e4m3, e4m3)
    assert "not float32" in scaled_mm.refusal(torch.float32, 32, 64, e4m3, e4m3)
    assert "no two matrices of float8_e5m2" in scaled_mm.refusal(torch.bfloat16, 32, 64, e5m2, e5m2)
    for chip, able in {
        "": False,
        "sm_80": False,
        "sm_89": True,
        "sm_120": True,
        "gfx90a": False,
        "gfx950": True,
    }.items():
        monkeypatch.setattr(chips, "chip", lambda chip=chip: chip)
        assert (scaled_mm.no_scaled_mm() is None) == able
    assert "multiplies OCP float8 on gfx950, not torch.float8_e4m3fnuz" in scaled_mm.refusal(
        torch.bfloat16, 32, 64, fnuz, fnuz
    )
    monkeypatch.setattr(chips, "chip", lambda: "gfx942")
    assert scaled_mm.refusal(torch.bfloat16, 32, 64, fnuz, fnuz) is None
    assert "multiplies FNUZ float8" in scaled_mm.refusal(torch.bfloat16, 32, 64, e4m3, e4m3)

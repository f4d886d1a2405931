"""An expert's first layer with its activation against a loop over rows in fp64, each gradient apart, NaN in tails."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kernels.test_grouped_gemm import SIZES, case, gather, naive
from tests.kernels.test_swiglu import GPT_OSS
from tests.kernels.test_swiglu import naive as naive_swiglu
from tests.poison import relative_error, unit_error

from maniple.kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu, ops, reference
from maniple.kernels.swiglu import swiglu


def check(
    sizes,
    *,
    form=GPT_OSS,
    gate_up="stacked",
    layout="nk",
    bias=True,
    probs=True,
    gathers=False,
    bound=2e-6,
    f=6,
    **shape,
):
    x_SK, w_G, ends_G, bias_G2F, probs_S, _ = case(sizes, n=2 * f, layout=layout, **shape)
    used, slots = sum(sizes), x_SK.shape[0]
    w_G, bias_G2F = 2 * w_G, 2 * bias_G2F  # so that many elements are past the limit
    grad_SF = torch.randn(slots, f, generator=torch.Generator().manual_seed(3))
    grad_SF[used:] = torch.nan
    source_S = slots_TK = None
    if gathers:
        x_SK, source_S, slots_TK = gather(sizes, k=x_SK.shape[1], tail=slots - used)
    inputs = {"x": x_SK, "w": w_G} | ({"bias": bias_G2F} if bias else {}) | ({"probs": probs_S} if probs else {})
    mine = {name: t.clone().requires_grad_() for name, t in inputs.items()}
    theirs = {name: t.double().requires_grad_() for name, t in inputs.items()}
    rows_SK = theirs["x"]
    if gathers:
        rows_SK = torch.cat([rows_SK, torch.zeros(1, x_SK.shape[1])])[source_S[:used].long()]
    product = naive(rows_SK, theirs["w"], sizes, theirs.get("bias"), None, layout)
    weights = theirs["probs"][:used] if probs else None
    expected = naive_swiglu(product, weights, **form, layout=gate_up)
    if used:
        expected.backward(grad_SF[:used].double())
    for _ in range(2):  # a second backward meets recycled memory
        out = grouped_gemm_swiglu(
            mine["x"],
            mine["w"],
            ends_G,
            bias_G2F=mine.get("bias"),
            probs_S=mine.get("probs"),
            **form,
            gate_up=gate_up,
            layout=layout,
            source_S=source_S,
            slots_TK=slots_TK,
        )
        grads = torch.autograd.grad(out, list(mine.values()), grad_SF)
        assert (out.dtype, out.shape) == (x_SK.dtype, (slots, f))
        assert unit_error(out[:used], expected) <= bound
        for (name, leaf), grad in zip(theirs.items(), grads, strict=True):
            wanted = leaf.grad if leaf.grad is not None else torch.zeros_like(leaf)
            rows = slice(used) if name == "probs" or (name == "x" and not gathers) else slice(None)
            assert unit_error(grad[rows], wanted[rows]) <= bound, name
        for g, size in enumerate(sizes):
            assert size or (grads[1][g] == 0).all()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("gathers", [False, True], ids=["rows", "gathered"])
def test_result_and_each_gradient(sizes, gathers):
    check(sizes, gathers=gathers)


@pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("gate_up", ["stacked", "interleaved"])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("bare", [False, True], ids=["bias and probs", "bare"])
def test_every_form(form, gate_up, layout, bare):
    check([3, 0, 4], form=form, gate_up=gate_up, layout=layout, bias=not bare, probs=not bare)


@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=4),
    k=st.integers(1, 9),
    f=st.integers(1, 9),
    tail=st.integers(0, 4),
    layout=st.sampled_from(["nk", "kn"]),
    gate_up=st.sampled_from(["stacked", "interleaved"]),
    gathers=st.booleans(),
)
@settings(max_examples=25, deadline=None)
def test_any_shape(sizes, k, f, tail, layout, gate_up, gathers):
    check(sizes, k=k, f=f, tail=tail, layout=layout, gate_up=gate_up, gathers=gathers, bound=4e-6)


def test_it_is_the_pair_of_operations():
    """In bf16 too, bit for bit: the product is rounded before the activation."""
    x_SK, w_G, ends_G, bias_G2F, probs_S, _ = case([2, 0, 3], k=64, n=12, dtype=torch.bfloat16)
    results = []
    for fused in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x_SK, w_G, bias_G2F, probs_S)]
        x, w, bias, probs = leaves
        if fused:
            out = grouped_gemm_swiglu(x, w, ends_G, bias_G2F=bias, probs_S=probs, **GPT_OSS)
        else:
            out = swiglu(grouped_gemm(x, w, ends_G, bias_GN=bias), probs, **GPT_OSS)
        grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
        results.append([out[:5].detach(), grads[0][:5], grads[1], grads[2], grads[3][:5]])
    for apart, together in zip(*results, strict=True):
        assert torch.equal(apart, together)


def test_the_tail_is_zeroed_on_demand_and_only_then():
    x_SK, w_G, ends_G, _, probs_S, _ = case([2, 1], n=8)
    x_SK.requires_grad_()
    assert grouped_gemm_swiglu(x_SK, w_G, ends_G, probs_S=probs_S)[3:].isnan().all()
    out = grouped_gemm_swiglu(x_SK, w_G, ends_G, probs_S=probs_S, zero_tail=True)
    assert (out[3:] == 0).all()
    assert out.isfinite().all()
    assert (torch.autograd.grad(out, x_SK, torch.full_like(out, torch.nan))[0][3:] == 0).all()


def test_weight_gradients_accumulate_in_main_grad_once_a_micro_batch():
    x_SK, w_G, ends_G, _, _, grad_SN = case([2, 0, 3], n=8)
    grad_SF = grad_SN[:, :4].contiguous()
    w_G = torch.nn.Parameter(w_G)
    (once,) = torch.autograd.grad(grouped_gemm_swiglu(x_SK, w_G, ends_G), w_G, grad_SF)
    w_G.main_grad = torch.full(w_G.shape, 100.0)
    w_G.grad_added_to_main_grad = False
    for _ in range(3):
        grouped_gemm_swiglu(x_SK, w_G, ends_G, fuse_wgrad_accumulation=True).backward(grad_SF)
        assert w_G.grad_added_to_main_grad
        w_G.grad = None
    assert relative_error(w_G.main_grad - 100, 3 * once) < 1e-5
    assert (w_G.main_grad[1] == 100).all()


def test_the_product_is_kept_only_for_a_gradient(monkeypatch):
    x_SK, w_G, ends_G, *_ = case([2, 3], n=8)
    for keep, rows in ((True, 8), (False, 0)):
        _, kept = reference.forward_swiglu(x_SK, w_G, ends_G, keep=keep)
        assert kept.shape == (rows, 8)
    asked = []
    monkeypatch.setattr(ops, "forward_swiglu", lambda *inputs: asked.append(inputs[13]) or (x_SK, x_SK[:0]))
    grouped_gemm_swiglu(x_SK, w_G, ends_G)
    grouped_gemm_swiglu(x_SK, w_G.requires_grad_(), ends_G)
    with torch.no_grad():
        grouped_gemm_swiglu(x_SK, w_G, ends_G)
    assert asked == [False, True, False]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(gate_up="up"), "interleaved"),
        (dict(w13_G=torch.zeros(3, 7, 5)), "2F"),
        (dict(bias_G2F=torch.zeros(3, 4)), "bias"),
        (dict(probs_S=torch.zeros(3)), "probs"),
        (dict(layout="mn"), "layout"),
    ],
)
def test_what_does_not_fit_is_refused(change, words):
    x_SK, w_G, ends_G, *_ = case([2, 1, 3], n=8)
    arguments = dict(x_SK=x_SK, w13_G=w_G, ends_G=ends_G) | change
    with pytest.raises(ValueError, match=words):
        grouped_gemm_swiglu(arguments.pop("x_SK"), arguments.pop("w13_G"), arguments.pop("ends_G"), **arguments)

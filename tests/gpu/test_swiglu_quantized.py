"""SwiGLU and its gradient quantized on Hopper, against the two operations one after the other: bit for bit."""

from __future__ import annotations

import pytest
import torch
from tests.poison import poisoned_memory, relative_error  # noqa: F401 (a fixture for every test here)

from maniple.kernels import chips, registry
from maniple.kernels.grouped_gemm import low_precision_swiglu
from maniple.kernels.quantize.passed import How
from maniple.kernels.swiglu import quantized_reference
from maniple.moe.experts import expert_mlp

pytestmark = pytest.mark.skipif(chips.no_hopper() is not None, reason="needs a Hopper GPU")

SIZES = {
    "uneven": [5, 0, 130, 1, 77, 640],
    "all empty": [0, 0],
    "many": [3, 0, 1, 130] * 40,
}
SETTINGS = [("fp8_block", torch.float8_e4m3fn), ("fp8_block", torch.float8_e5m2), ("mxfp8", torch.float8_e4m3fn)]


def case(sizes, f, tail=50):
    """grad `[S, F]`, gate_up `[S, 2F]`, probs, ends on the GPU: NaN tails, hard rows."""
    g = torch.Generator(device="cuda").manual_seed(0)
    used = sum(sizes)
    grad_SF, gate_up_S2F = (torch.randn(used + tail, n, device="cuda", generator=g).bfloat16() for n in (f, 2 * f))
    probs_S = torch.rand(used + tail, device="cuda", generator=g)
    gate_up_S2F[1:used:7] *= 100
    gate_up_S2F[2:used:11, ::3] = 0
    grad_SF[3:used:5] *= 1e-20
    gate_up_S2F[4:used:97, 5] = torch.inf
    gate_up_S2F[6:used:89, f + 3] = torch.nan
    for tensor in (grad_SF, gate_up_S2F, probs_S):
        tensor[used:] = torch.nan
    return grad_SF, gate_up_S2F, probs_S, torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)


def same(got, wanted, used, recipe):
    """Data and scales in both orientations, as far as they may be read."""
    assert torch.equal(got[4], wanted[4])
    columns, block = int(wanted[4][-1]), 32 if recipe == "mxfp8" else 128
    for a, b, place in zip(
        got[:4],
        wanted[:4],
        (slice(used), slice(used), (slice(None), slice(columns)), (slice(None), slice(columns // block))),
        strict=True,
    ):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        if a.numel():
            bits = {1: torch.uint8, 4: torch.int32}[a.element_size()]
            assert torch.equal(a.view(bits)[place], b.view(bits)[place])


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize(("recipe", "dtype"), SETTINGS)
@pytest.mark.parametrize("f", [128, 768])
def test_the_bits_of_two_operations(recipe, dtype, sizes, f):
    from maniple.kernels.swiglu import hopper

    grad_SF, gate_up_S2F, probs_S, ends_G = case(sizes, f)
    used = sum(sizes)
    for which in ((True, True), (True, False), (False, True)):
        how = How(recipe, dtype, "rceil", *which)
        rows = gate_up_S2F, probs_S, ends_G
        same(hopper.forward(*rows, how), quantized_reference.forward(*rows, how), used, recipe)
        got, wanted = (fn.backward(grad_SF, *rows, how) for fn in (hopper, quantized_reference))
        same(got, wanted, used, recipe)
        finite = wanted[5][:used].isfinite()
        assert torch.equal(got[5][:used].isfinite(), finite)
        assert relative_error(got[5][:used][finite], wanted[5][:used][finite]) < 1e-6 if used else True
        assert (got[5][used:] == 0).all()
        assert torch.equal(hopper.backward(grad_SF, *rows, how)[5][:used][finite], got[5][:used][finite])


def test_strided_operands():
    from maniple.kernels.swiglu import hopper

    grad_SF, gate_up_S2F, probs_S, ends_G = case([200, 0, 33], 256)
    wide = torch.full((gate_up_S2F.shape[0], 600), torch.nan, device="cuda", dtype=torch.bfloat16)
    wide[:, 8:520] = gate_up_S2F
    rows, how = (probs_S, ends_G), How("fp8_block", torch.float8_e4m3fn, "rceil", True, True)
    wanted = quantized_reference.backward(grad_SF, gate_up_S2F, *rows, how)
    for grad in (grad_SF, grad_SF.t().contiguous().t()):
        same(hopper.backward(grad, wide[:, 8:520], *rows, how), wanted, 233, "fp8_block")


@pytest.mark.parametrize("recompute", ["none", "activation", "all"])
def test_experts_compute_the_same(monkeypatch, recompute):
    g = torch.Generator(device="cuda").manual_seed(1)
    sizes, d, f = [200, 0, 33, 500], 256, 384
    ends_G = torch.tensor(sizes, device="cuda").cumsum(0).to(torch.int32)
    used = sum(sizes)

    def leaf(*shape):
        return torch.randn(shape, device="cuda", generator=g).bfloat16().requires_grad_()

    leaves = leaf(used + 70, d), leaf(len(sizes), 2 * f, d), leaf(len(sizes), d, f)
    probs_S = torch.rand(used + 70, device="cuda", generator=g).requires_grad_()
    grad_SD = torch.randn(used + 70, d, device="cuda", generator=g).bfloat16()
    found = []
    for fused in (True, False):
        chosen = "hopper" if fused else None
        monkeypatch.setattr(low_precision_swiglu, "_fused", lambda *operands, chosen=chosen: chosen)
        rows_SD, w13, w2 = leaves
        out_SD = expert_mlp(rows_SD, probs_S, ends_G, w13, w2, recipe="fp8_block", recompute=recompute)
        out_SD.backward(grad_SD)
        grads = [tensor.grad for tensor in (rows_SD, w13, w2, probs_S)]
        found.append((out_SD[:used], grads[0][:used], grads[1], grads[2], grads[3][:used]))
        for tensor in (*leaves, probs_S):
            tensor.grad = None
    assert ("quantized_swiglu", "fp8_block", "cuda", "hopper") in registry.used()
    assert all(torch.equal(a, b) for a, b in zip(found[0][:4], found[1][:4], strict=True))
    assert relative_error(found[0][4], found[1][4]) < 1e-5

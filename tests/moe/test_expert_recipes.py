"""One rank's experts in the low-precision recipes: every result and gradient against fp64, with NaN in the tail."""

from __future__ import annotations

import pytest
import torch
from tests.kernels.test_low_precision import snr
from tests.moe.oracle import GPT_OSS

from maniple.kernels.quantize import QuantizedWeight
from maniple.moe.experts import ExpertActivation, expert_mlp

RECIPES = ["fp8", "fp8_block", "mxfp8"]
SIZES, TAIL = [5, 0, 130, 1], 7
D, F = 72, 40


def case(biases: bool):
    """rows, probs, w13, w2 and biases; ends and a gradient of the result."""
    g = torch.Generator().manual_seed(0)
    slots, experts = sum(SIZES) + TAIL, len(SIZES)

    def random(*shape, scale=1.0, dtype=torch.bfloat16):
        return (torch.randn(*shape, generator=g) * scale).to(dtype)

    rows_SD, probs_S = random(slots, D), torch.rand(slots, generator=g)
    grad_SD = random(slots, D)
    for tensor in (rows_SD, probs_S, grad_SD):
        tensor[-TAIL:] = torch.nan
    leaves = [rows_SD, probs_S, random(experts, 2 * F, D, scale=D**-0.5), random(experts, D, F, scale=F**-0.5)]
    if biases:
        leaves += [random(experts, 2 * F, scale=0.3), random(experts, D, scale=0.3)]
    return leaves, torch.tensor(SIZES).cumsum(0).to(torch.int32), grad_SD


def run(leaves, ends_G, grad_SD, activation, **settings):
    """(out, its gradients), these computed twice: the second backward meets recycled memory."""
    own = [leaf.clone().requires_grad_() for leaf in leaves]
    words = dict(zip(("b13_GF", "b2_GD"), own[4:], strict=False))
    for _ in range(2):
        out_SD = expert_mlp(own[0], own[1], ends_G, own[2], own[3], activation=activation, **words, **settings)
        gradients = torch.autograd.grad(out_SD, own, grad_SD)
    return [out_SD, *gradients]


def exact(leaves, grad_SD, activation):
    own = [leaf.double().requires_grad_() for leaf in leaves]
    rows_SD, probs_S, w13_GFD, w2_GDF, *biases = own
    parts, start = [], 0
    for expert, size in enumerate(SIZES):
        rows = slice(start, start + size)
        gate, up = (rows_SD[rows] @ w13_GFD[expert].t() + (biases[0][expert] if biases else 0)).chunk(2, -1)
        if activation.limit is not None:
            gate, up = gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit)
        hidden = (up + activation.up_offset) * gate * torch.sigmoid(activation.alpha * gate)
        out = hidden @ w2_GDF[expert].t() + (biases[1][expert] if biases else 0)
        parts.append(probs_S[rows, None] * out)
        start += size
    out_SD = torch.cat(parts)
    return [out_SD, *torch.autograd.grad(out_SD, own, grad_SD[:start].double())]


@pytest.mark.parametrize("kernels", ["auto", "reference"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("biases", [False, True])
def test_every_result_is_exact_but_for_noise(recipe, biases, kernels):
    activation = GPT_OSS if biases else ExpertActivation()
    leaves, ends_G, grad_SD = case(biases)
    got = run(leaves, ends_G, grad_SD, activation, recipe=recipe, kernels=kernels)
    names = ["out", "rows", "probs", "w13", "w2", *(["b13", "b2"] if biases else [])]
    for name, a, b in zip(names, got, exact(leaves, grad_SD, activation), strict=True):
        used = slice(sum(SIZES)) if name in ("out", "rows", "probs") else slice(None)
        assert snr(a[used], b[used]) >= 20, name
    for name, gradient in zip(names[3:], got[3:], strict=True):
        assert (gradient[1] == 0).all(), name  # of the expert without rows


@pytest.mark.parametrize("recipe", RECIPES)
def test_kept_weights_and_added_gradients_change_nothing(recipe):
    leaves, ends_G, grad_SD = case(True)
    wanted = run([t.float() for t in leaves], ends_G, grad_SD.float(), GPT_OSS, recipe=recipe)
    caches = QuantizedWeight(recipe, check=True), QuantizedWeight(recipe, check=True)
    for a, b in zip(
        run(leaves, ends_G, grad_SD, GPT_OSS, recipe=recipe, caches=caches),
        run(leaves, ends_G, grad_SD, GPT_OSS, recipe=recipe),
        strict=True,
    ):
        used = slice(None) if a.shape[0] == len(SIZES) else slice(sum(SIZES))
        assert torch.equal(a[used], b[used])
    own = [leaf.float().requires_grad_() for leaf in leaves]
    for weight in own[2:4]:
        weight.main_grad = torch.ones_like(weight)
    out_SD = expert_mlp(
        *own[:2],
        ends_G,
        *own[2:4],
        b13_GF=own[4],
        b2_GD=own[5],
        activation=GPT_OSS,
        recipe=recipe,
        fuse_wgrad_accumulation=True,
    )
    out_SD.backward(grad_SD.float())
    for weight, gradient in zip(own[2:4], wanted[3:5], strict=True):
        assert weight.grad_added_to_main_grad
        assert torch.allclose(weight.main_grad, 1 + gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("recipe", RECIPES)
def test_no_rows_at_all(recipe):
    """As a rank may receive them."""
    leaves, ends_G, grad_SD = case(True)
    leaves = [leaves[0][:0], leaves[1][:0], *leaves[2:]]
    out_SD, *gradients = run(leaves, torch.zeros_like(ends_G), grad_SD[:0], GPT_OSS, recipe=recipe)
    assert out_SD.shape == (0, D)
    assert [g.shape for g in gradients] == [t.shape for t in leaves]
    assert not any(g.any() for g in gradients)


def test_bf16_keeps_no_quantized_weight():
    leaves, ends_G, _ = case(False)
    with pytest.raises(ValueError, match="recipe bf16 quantizes nothing: leave caches out"):
        expert_mlp(*leaves[:2], ends_G, *leaves[2:], caches=(QuantizedWeight("fp8"), QuantizedWeight("fp8")))

"""The cache of quantized weights: one quantization a step, and training as without it, bit for bit."""

from __future__ import annotations

import pytest
import torch

from maniple.kernels.quantize import QuantizedWeight, bump, dequantize, generation, quantize_weight
from maniple.kernels.quantize import cache as cache_module

RECIPES = ["fp8", "fp8_block", "mxfp8"]


@pytest.fixture
def count(monkeypatch):
    """How often weights were quantized."""
    calls = []

    def counted(*arguments, **settings):
        calls.append(1)
        return quantize_weight(*arguments, **settings)

    monkeypatch.setattr(cache_module, "quantize_weight", counted)
    return calls


class Linear(torch.autograd.Function):
    """`x @ wᵀ` and its gradients with the quantized weight, in both of its orientations."""

    @staticmethod
    def forward(ctx, x_SK, w_GNK, quantized):
        made = quantized(w_GNK)
        ctx.save_for_backward(x_SK)
        ctx.quantized, ctx.weight = quantized, w_GNK
        return x_SK @ dequantize(made.forward, torch.float32)[0].t()

    @staticmethod
    def backward(ctx, grad_SN):
        (x_SK,) = ctx.saved_tensors
        w_KN = dequantize(ctx.quantized(ctx.weight).dgrad, torch.float32)[0]
        return grad_SN @ w_KN.t(), (grad_SN.t() @ x_SK)[None].to(ctx.weight.dtype), None


def train(recipe: str, quantizers, *, say: bool = True, steps: int = 4) -> list[torch.Tensor]:
    """Two layers, two micro-batches a step; the optimizer writes through `.data`, where torch sees nothing."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(1, 24, 24, generator=generator).bfloat16().requires_grad_() for _ in range(2)]
    x_SK = torch.randn(2, 8, 24, generator=generator)
    for _ in range(steps):
        for micro_batch in x_SK:
            hidden = micro_batch
            for weight, quantized in zip(weights, quantizers, strict=True):
                hidden = Linear.apply(hidden, weight, quantized).tanh()
            hidden.square().mean().backward()
        for weight in weights:
            weight.data.add_(weight.grad, alpha=-3.0)
            weight.grad = None
        if say:
            bump(weights)
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize("recipe", RECIPES)
def test_training_is_the_same_with_and_without(recipe, count):
    cached = train(recipe, [QuantizedWeight(recipe, check=True) for _ in range(2)])
    assert len(count) == 2 * 4  # weights, steps; not micro-batches, not both directions
    plain = train(recipe, [lambda w: quantize_weight(w, recipe)] * 2)
    for a, b in zip(cached, plain, strict=True):
        assert torch.equal(a, b)


def test_without_a_word_it_would_be_stale_and_the_check_says_so():
    with pytest.raises(RuntimeError, match=r"call maniple\.kernels\.quantize\.bump"):
        train("fp8", [QuantizedWeight("fp8", check=True) for _ in range(2)], say=False)
    stale = train("fp8", [QuantizedWeight("fp8") for _ in range(2)], say=False)
    plain = train("fp8", [lambda w: quantize_weight(w, "fp8")] * 2)
    assert not torch.equal(stale[0], plain[0])


def test_one_weight_s_bump_is_not_another_s():
    a, b = torch.randn(1, 3, 4), torch.randn(1, 3, 4)
    kept = {name: QuantizedWeight("fp8") for name in "ab"}
    first = kept["a"](a), kept["b"](b)
    assert kept["a"](a) is first[0]
    bump([a])
    assert kept["a"](a) is not first[0]
    assert kept["b"](b) is first[1]
    before = generation(b)
    bump()
    assert generation(b) != before
    assert kept["b"](b) is not first[1]


def test_what_torch_sees_is_heeded_too():
    w = torch.randn(1, 3, 4)
    kept = QuantizedWeight("fp8")
    first = kept(w)
    w.mul_(2)
    second = kept(w)
    assert second is not first
    assert torch.equal(dequantize(second.forward), dequantize(quantize_weight(w, "fp8").forward))
    w.data = torch.randn(1, 3, 4)  # other memory
    assert kept(w) is not second
    assert torch.equal(kept(w).forward.data.float(), quantize_weight(w, "fp8").forward.data.float())


def test_cleared_memory_is_given_back_and_made_again(count):
    w = torch.randn(1, 3, 4)
    kept = QuantizedWeight("fp8_block", dtype=torch.float8_e5m2, dgrad=False)
    assert kept(w).forward.data.dtype == torch.float8_e5m2
    assert kept(w).dgrad is None
    kept.clear()
    kept(w)
    assert len(count) == 2


def test_the_digest_sees_one_bit_and_two_values_that_change_places():
    w = torch.randn(1, 64, 64).bfloat16()
    before = cache_module.digest(w)
    assert cache_module.digest(w.clone()) == before
    flipped = w.clone()
    flipped.view(torch.int16)[0, 5, 5] ^= 1
    swapped = w.clone()
    swapped[0, 0], swapped[0, 1] = w[0, 1], w[0, 0]
    assert len({before, cache_module.digest(flipped), cache_module.digest(swapped)}) == 3


def test_a_view_is_the_weight_and_a_part_is_refused():
    w = torch.randn(3, 4, requires_grad=True)
    kept = QuantizedWeight("fp8")
    first = kept(w[None])
    assert kept(w.detach()[None]) is first
    bump([w])
    assert kept(w[None]) is not first
    with pytest.raises(ValueError, match="pass it whole"):
        kept(w[None, 1:])


def test_weights_without_values_are_quantized_too():
    kept = QuantizedWeight("fp8")
    assert kept(torch.empty(1, 3, 4, device="meta")).forward.data.is_meta

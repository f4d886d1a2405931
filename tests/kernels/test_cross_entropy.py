"""Head and loss in one against torch's own cross-entropy in float64, whatever the chunks."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from maniple.kernels import cross_entropy
from maniple.kernels.cross_entropy import linear_cross_entropy


def operands(tokens: int, vocabulary: int, width: int, dtype=torch.float32, scale: float = 1.0):
    generator = torch.Generator().manual_seed(tokens + vocabulary)
    hidden_TD = torch.randn(tokens, width, generator=generator) * scale
    w_VD = torch.randn(vocabulary, width, generator=generator) / width**0.5
    labels_T = torch.randint(vocabulary, (tokens,), generator=generator)
    grad_T = torch.rand(tokens, generator=generator)
    return hidden_TD.to(dtype).requires_grad_(), w_VD.to(dtype).requires_grad_(), labels_T, grad_T


def oracle(hidden_TD, w_VD, labels_T, grad_T):
    """Losses, and gradients of both operands, in float64."""
    hidden_TD, w_VD = (t.detach().double().requires_grad_() for t in (hidden_TD, w_VD))
    losses_T = F.cross_entropy(hidden_TD @ w_VD.T, labels_T, reduction="none")
    return losses_T.detach(), *torch.autograd.grad(losses_T, (hidden_TD, w_VD), grad_T.double())


def distance(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got.double() - wanted).abs().max() / wanted.abs().max())


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(1, 130),
    width=st.integers(1, 20),
    chunk=st.integers(1, 50) | st.none(),
    keep=st.booleans(),
    scale=st.sampled_from([1e-6, 1.0, 30.0]),
)
def test_losses_and_gradients_are_torchs(tokens, vocabulary, width, chunk, keep, scale):
    hidden_TD, w_VD, labels_T, grad_T = operands(tokens, vocabulary, width, scale=scale)
    wanted = oracle(hidden_TD, w_VD, labels_T, grad_T)
    how = {"keep_logits": True} if keep else {"chunk_tokens": chunk}
    losses_T = linear_cross_entropy(hidden_TD, w_VD, labels_T, **how)
    grads = torch.autograd.grad(losses_T, (hidden_TD, w_VD), grad_T)
    torch.testing.assert_close(losses_T.double(), wanted[0], rtol=1e-5, atol=1e-5)
    for got, want in zip(grads, wanted[1:], strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5 * max(1e-3, float(want.abs().max())))


def test_bf16_logits_are_those_of_a_head_of_its_own():
    hidden_TD, w_VD, labels_T, grad_T = operands(64, 500, 32, torch.bfloat16)
    losses_T = linear_cross_entropy(hidden_TD, w_VD, labels_T, chunk_tokens=16)
    logits_TV = (hidden_TD @ w_VD.T).float()
    assert losses_T.dtype == torch.float32
    assert distance(losses_T, F.cross_entropy(logits_TV, labels_T, reduction="none").double()) < 1e-6
    grads = torch.autograd.grad(losses_T, (hidden_TD, w_VD), grad_T)
    wanted = oracle(hidden_TD, w_VD, labels_T, grad_T)[1:]
    assert [g.dtype for g in grads] == [torch.bfloat16, torch.bfloat16]
    assert max(distance(g, w) for g, w in zip(grads, wanted, strict=True)) < 2e-2


def test_each_gradient_alone_and_two_backwards():
    hidden_TD, w_VD, labels_T, grad_T = operands(30, 70, 8)
    wanted = oracle(hidden_TD, w_VD, labels_T, grad_T)
    for index, operand in enumerate((hidden_TD, w_VD)):
        others = [t if t is operand else t.detach() for t in (hidden_TD, w_VD)]
        (got,) = torch.autograd.grad(linear_cross_entropy(*others, labels_T, chunk_tokens=7), operand, grad_T)
        assert distance(got, wanted[1 + index]) < 1e-5
    losses_T = linear_cross_entropy(hidden_TD, w_VD, labels_T, chunk_tokens=7)
    for _ in range(2):
        losses_T.backward(grad_T, retain_graph=True)
    assert distance(w_VD.grad, 2 * wanted[2]) < 1e-5


def test_the_weights_gradient_is_added_to_main_grad_once_a_pass():
    hidden_TD, w_VD, labels_T, grad_T = operands(30, 70, 8)
    w_VD.main_grad = torch.full(w_VD.shape, 0.25)
    wanted = oracle(hidden_TD, w_VD, labels_T, grad_T)
    for passes in (1, 2):
        losses_T = linear_cross_entropy(hidden_TD, w_VD, labels_T, chunk_tokens=11, fuse_wgrad_accumulation=True)
        losses_T.backward(grad_T)
        assert distance(w_VD.main_grad, 0.25 + passes * wanted[2]) < 1e-5
    assert w_VD.grad_added_to_main_grad
    assert distance(hidden_TD.grad, 2 * wanted[1]) < 1e-5


def test_a_cut_vocabulary_is_put_together():
    """Two parts of the vocabulary, one after the other, as two ranks would have them."""
    hidden_TD, w_VD, labels_T, grad_T = operands(40, 90, 8)
    wanted = oracle(hidden_TD, w_VD, labels_T, grad_T)
    parts = [
        cross_entropy.reference.statistics(hidden_TD @ w.T, labels_T - 45 * i) for i, w in enumerate(w_VD.split(45))
    ]
    lse_T = torch.stack([lse for lse, _ in parts]).logsumexp(0)
    target_T = sum(target for _, target in parts)

    class Other:
        def gather(self, x):
            return x

        def combine(self, lse, target):
            return lse_T.detach(), target_T.detach()

        def reduce(self, grad):
            return lambda: grad

    grads_h, grads_w = [], []
    for i in range(2):
        w = w_VD[45 * i : 45 * i + 45].detach().requires_grad_()
        losses_T = linear_cross_entropy(hidden_TD, w, labels_T, first=45 * i, exchange=Other(), chunk_tokens=9)
        assert distance(losses_T, wanted[0]) < 1e-6
        grad_h, grad_w = torch.autograd.grad(losses_T, (hidden_TD, w), grad_T)
        grads_h.append(grad_h)
        grads_w.append(grad_w)
    assert distance(sum(grads_h), wanted[1]) < 1e-5
    assert distance(torch.cat(grads_w), wanted[2]) < 1e-5


def test_logits_exist_for_a_chunk_alone(monkeypatch):
    seen = []
    for name in ("statistics", "gradient"):
        original = getattr(cross_entropy.reference, name)
        monkeypatch.setattr(
            cross_entropy.reference,
            name,
            lambda logits, *a, f=original: (seen.append(tuple(logits.shape)), f(logits, *a))[1],
        )
    hidden_TD, w_VD, labels_T, grad_T = operands(50, 70, 8)
    losses_T = linear_cross_entropy(hidden_TD, w_VD, labels_T, chunk_tokens=20)
    saved = losses_T.grad_fn.saved_tensors
    losses_T.backward(grad_T)
    assert seen == 2 * [(20, 70), (20, 70), (10, 70)]
    assert sorted(t.numel() for t in saved) == [50, 50, 50 * 8, 70 * 8]


def test_logits_that_are_kept_are_made_once_and_again_for_a_second_backward_pass(monkeypatch):
    """An implementation that leaves the gradient in the logits' memory, as the one on a GPU does."""
    made, original = [], cross_entropy.reference.gradient
    monkeypatch.setattr(
        cross_entropy.reference,
        "gradient",
        lambda logits, *rest: (made.append(logits), logits.data.copy_(original(logits, *rest)))[1],
    )
    hidden_TD, w_VD, labels_T, grad_T = operands(50, 70, 8)
    wanted = oracle(hidden_TD, w_VD, labels_T, grad_T)
    losses_T = linear_cross_entropy(hidden_TD, w_VD, labels_T, keep_logits=True)
    saved = losses_T.grad_fn.saved_tensors
    assert sorted(t.numel() for t in saved) == [50, 50, 50 * 8, 70 * 8, 50 * 70]
    for _ in range(2):
        losses_T.backward(grad_T, retain_graph=True)
    assert made[0].data_ptr() == saved[-1].data_ptr() != made[1].data_ptr()
    assert distance(w_VD.grad, 2 * wanted[2]) < 1e-5
    assert distance(hidden_TD.grad, 2 * wanted[1]) < 1e-5
    with torch.no_grad():
        assert not linear_cross_entropy(hidden_TD, w_VD, labels_T, keep_logits=True).requires_grad


def test_without_tokens_the_weights_gradient_is_zero():
    hidden_TD, w_VD, labels_T, _ = operands(0, 70, 8)
    for keep in (False, True):
        losses_T = linear_cross_entropy(hidden_TD, w_VD, labels_T, keep_logits=keep)
        (grad_VD,) = torch.autograd.grad(losses_T.sum(), w_VD)
        assert grad_VD.count_nonzero() == 0


def test_nothing_is_hidden_of_a_value_that_is_none():
    hidden_TD, w_VD, labels_T, _ = operands(5, 10, 4)
    with torch.no_grad():
        hidden_TD[2] = torch.nan
    losses_T = linear_cross_entropy(hidden_TD, w_VD, labels_T)
    assert losses_T.isnan().tolist() == [False, False, True, False, False]


def test_tensors_without_values_have_shapes():
    hidden, w_VD = torch.empty(3, 4, 8, device="meta", requires_grad=True), torch.empty(50, 8, device="meta")
    losses = linear_cross_entropy(hidden, w_VD.requires_grad_(), torch.empty(3, 4, dtype=torch.int64, device="meta"))
    assert losses.shape == (3, 4)
    losses.sum().backward()
    assert hidden.grad.shape == hidden.shape
    assert w_VD.grad.shape == w_VD.shape


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden": torch.zeros(4, 7)}, "of one dtype"),
        ({"w_VD": torch.zeros(9, 8).bfloat16()}, "of one dtype"),
        ({"labels": torch.zeros(5, dtype=torch.int64)}, "labels are int64 of shape [4]"),
        ({"labels": torch.zeros(4, dtype=torch.int32)}, "labels are int64"),
        ({"chunk_tokens": 0}, "chunk_tokens is 1 or more"),
        ({"fuse_wgrad_accumulation": True}, "main_grad"),
    ],
)
def test_operands_that_do_not_agree_are_refused(change, says):
    words = {
        "hidden": torch.zeros(4, 8),
        "w_VD": torch.zeros(9, 8),
        "labels": torch.zeros(4, dtype=torch.int64),
    } | change
    with pytest.raises(ValueError, match=re.escape(says)):
        linear_cross_entropy(**words)

"""Attention by chunks equals a plain one in float64: windows, sinks, documents and padding, whatever the chunk."""

from __future__ import annotations

import gc
import itertools
import math
from types import SimpleNamespace

import pytest
import torch

from maniple.engines.megatron import attention, context, flash
from maniple.engines.megatron.documents import complete

LENGTH, BATCH, HEADS, GROUPS, SIZE, VALUE = 24, 2, 4, 2, 12, 8
TOLERANCE = 2e-5  # of the largest magnitude in the tensor
WINDOWS = (None, 1, 5, 16, LENGTH)
# a row of one piece; one that begins and ends with a document of one token, and has padding
DOCUMENTS = torch.tensor([[1] * 13 + [2] * 11, [1] + [2] * 9 + [3] * 7 + [4] + [0] * 6], dtype=torch.int32)


def plain(q_BHSD, k_BGSD, v_BGSV, window, sinks_H, documents_BS):
    """Query by query, over the keys that it may see."""
    out_BHSV = torch.zeros(*q_BHSD.shape[:3], v_BGSV.shape[-1], dtype=torch.float64)
    for b, h, i in itertools.product(*map(range, q_BHSD.shape[:3])):
        g = h * k_BGSD.shape[1] // q_BHSD.shape[1]
        seen = [
            j
            for j in range(i + 1)
            if (window is None or i - j < window) and (documents_BS is None or documents_BS[b, i] == documents_BS[b, j])
        ]
        weights = (k_BGSD[b, g, seen] @ q_BHSD[b, h, i] / math.sqrt(SIZE)).exp()
        total = weights.sum() + (0 if sinks_H is None else sinks_H[h].exp())
        out_BHSV[b, h, i] = weights @ v_BGSV[b, g, seen] / total
    return out_BHSV


def operands(sinks: bool):
    generator = torch.Generator().manual_seed(3)
    shapes = [(BATCH, HEADS, LENGTH, SIZE), (BATCH, GROUPS, LENGTH, SIZE), (BATCH, GROUPS, LENGTH, VALUE)]
    found = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    found.append(torch.randn(HEADS, generator=generator, dtype=torch.float64) if sinks else None)
    grad_BHSV = torch.randn(BATCH, HEADS, LENGTH, VALUE, generator=generator, dtype=torch.float64)
    return found, grad_BHSV


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float(
        (got - wanted).abs().max() / wanted.abs().max().clamp(min=0.1)
    )  # with a window of 1 q and k do nothing


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", WINDOWS)
def test_chunks(window, sinks, apart):
    documents_BS = DOCUMENTS if apart else None
    inputs, grad_BHSV = operands(sinks)
    exact = [None if t is None else t.clone().requires_grad_() for t in inputs]
    wanted = plain(*exact[:3], window, exact[3], documents_BS)
    used = [t for t in exact if t is not None]
    wanted_grads = torch.autograd.grad(wanted, used, grad_BHSV)
    for size in (1, 2, 3):
        mine = [None if t is None else t.float().requires_grad_() for t in inputs]
        layer = SimpleNamespace(window=window, softmax_offset=mine[3], softmax_scale=1 / math.sqrt(SIZE), biases={})
        got = torch.full(wanted.shape, math.nan)
        for first, end in itertools.chain(*(context.spans(LENGTH, size, rank) for rank in range(size))):
            chunk = attention.SDPAttention._attend(layer, mine[0][:, :, first:end], *mine[1:3], first, documents_BS)
            got[:, :, first:end] = chunk
        assert error(got.detach(), wanted.detach()) <= TOLERANCE
        grads = torch.autograd.grad(got, [t for t in mine if t is not None], grad_BHSV.float())
        for found, exactly in zip(grads, wanted_grads, strict=True):
            assert error(found, exactly) <= TOLERANCE


class PlainFlash:
    """What torch's flash kernels are to give, by plain operators. The queries are the last of the tokens."""

    @staticmethod
    def scores(q_BLHD, k_BNGD, scale, before):
        k_BNHD = k_BNGD.repeat_interleave(q_BLHD.shape[2] // k_BNGD.shape[2], 2)
        scores_BHLN = torch.einsum("blhd,bnhd->bhln", q_BLHD, k_BNHD) * scale
        last_L1 = torch.arange(k_BNGD.shape[1])[-q_BLHD.shape[1] :, None]
        back_LN = last_L1 - torch.arange(k_BNGD.shape[1])
        return scores_BHLN.masked_fill((back_LN < 0) | (back_LN > (back_LN if before is None else before)), -math.inf)

    @classmethod
    def _flash_attention_forward(cls, q, k, v, *_, scale, window_size_left, window_size_right):
        assert window_size_right == 0
        scores_BHLN = cls.scores(q, k, scale, window_size_left)
        v_BNHD = v.repeat_interleave(q.shape[2] // v.shape[2], 2)
        out = torch.einsum("bhln,bnhd->blhd", scores_BHLN.softmax(-1), v_BNHD)
        return out, scores_BHLN.logsumexp(-1), torch.zeros(2), None, None

    @classmethod
    def _flash_attention_backward(cls, grad, q, k, v, out, lse_BHL, *_, scale, window_size_left, window_size_right):
        many = q.shape[2] // k.shape[2]
        k_BNHD, v_BNHD = (t.repeat_interleave(many, 2) for t in (k, v))
        p_BHLN = (cls.scores(q, k, scale, window_size_left) - lse_BHL[..., None]).exp()
        delta_BHL1 = (grad * out).sum(-1).transpose(1, 2)[..., None]
        ds_BHLN = p_BHLN * (torch.einsum("blhd,bnhd->bhln", grad, v_BNHD) - delta_BHL1) * scale
        each = torch.einsum("bhln,blhd->bnhd", ds_BHLN, q), torch.einsum("bhln,blhd->bnhd", p_BHLN, grad)
        return torch.einsum("bhln,bnhd->blhd", ds_BHLN, k_BNHD), *(t.unflatten(2, (-1, many)).sum(3) for t in each)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5])
def test_windows_sinks_and_chunks_by_flash_attention(window, sinks, monkeypatch):
    monkeypatch.setattr(flash, "takes", lambda *operands: True)
    monkeypatch.setattr(flash, "_ops", PlainFlash)
    inputs, grad_BHSV = operands(sinks)
    inputs[0], inputs[1] = inputs[0][..., :VALUE], inputs[1][..., :VALUE]
    used = [t.requires_grad_() for t in inputs if t is not None]
    exact = plain(*inputs[:3], window, inputs[3], None)
    wanted = [exact, *torch.autograd.grad(exact, used, grad_BHSV, allow_unused=True)]
    layer = SimpleNamespace(window=window, softmax_offset=inputs[3], softmax_scale=1 / math.sqrt(SIZE), biases={})
    spans = sorted(itertools.chain(*(context.spans(LENGTH, 2, rank) for rank in range(2))))
    chunks = [attention.SDPAttention._attend(layer, used[0][:, :, a:b], *used[1:3], a, None) for a, b in spans]
    found = torch.cat(chunks, 2)
    for got, right in zip([found, *torch.autograd.grad(found, used, grad_BHSV)], wanted, strict=True):
        assert error(got.detach(), right.detach()) <= 1e-6  # the sinks' sums are in fp32


def test_no_key_outside_the_window_is_touched():
    """A chunk reads the keys from its first query's window on, by sixteens, and no later one than its last query."""
    (q, k, v, _), _ = operands(False)
    layer = SimpleNamespace(window=5, softmax_offset=None, softmax_scale=0.3, biases={})
    k[:, :, :16], k[:, :, 22:] = math.nan, math.nan  # the first query, 20, sees 16 to 20
    out = attention.SDPAttention._attend(layer, q[:, :, 20:22], k, v, 20, None)
    assert bool(out.isfinite().all())


def test_layers_share_a_bias_while_the_documents_live():
    documents_BS = DOCUMENTS.clone()
    (q, k, v, _), _ = (t for t in operands(False))
    layers = [SimpleNamespace(window=w, softmax_offset=None, softmax_scale=0.3, biases={}) for w in (None, None, 5)]
    known = len(attention._biases_of)
    for layer in layers:
        attention.SDPAttention._attend(layer, q, k, v, 0, documents_BS)
    assert len(attention._biases_of[documents_BS]) == 2
    assert not any(layer.biases for layer in layers)
    for layer in layers[1:]:
        layer.biases = layers[0].biases
        attention.SDPAttention._attend(layer, q[:, :, 12:18], k, v, 12, None)
    assert len(layers[0].biases) == 2
    assert len(attention._biases_of) == known + 1
    del documents_BS
    gc.collect()
    assert len(attention._biases_of) == known


def test_biases_do_not_pile_up():
    known: dict = {}
    for length in range(1, 40):
        attention.shared_bias(known, 0, length, 0, None, True, None, torch.zeros(1))
        assert len(known) <= 8


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_chunks_cover_a_sequence_and_weigh_alike(size):
    spans = [context.spans(48, size, rank) for rank in range(size)]
    assert sorted(token for rank in spans for span in rank for token in range(*span)) == list(range(48))
    looks = [sum(token + 1 for span in rank for token in range(*span)) for rank in spans]
    assert len(set(looks)) == 1


def test_sequences_that_do_not_divide_are_refused():
    with pytest.raises(ValueError, match="42 tokens does not divide into 2 x 4 chunks"):
        context.spans(42, 4, 0)


def test_a_place_is_complete_if_what_follows_is_its_own():
    documents_BS = torch.tensor([[1, 1, 1, 2, 3, 3, 0, 0]])
    assert complete(documents_BS, 1).int().tolist() == [[1, 1, 0, 0, 1, 0, 0, 0]]
    assert complete(documents_BS, 2).int().tolist() == [[1, 0, 0, 0, 0, 0, 0, 0]]
    assert not complete(documents_BS, 9).any()

"""Permutation against loops over tokens; dropped ids, tails of NaN, ties, and adjointness."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.poison import relative_error

from maniple.kernels.permute import permute, permute_probs, sort_by_expert, unpermute


def naive_order(ids_TK, experts):
    """Slots as (token, k), expert by expert, then token by token: no sort involved."""
    tokens, topk = ids_TK.shape
    order = [(t, k) for e in range(experts) for t in range(tokens) for k in range(topk) if ids_TK[t, k] == e]
    sizes = [(ids_TK == e).sum().item() for e in range(experts)]
    return order, torch.tensor(sizes).cumsum(0).to(torch.int32)


def choose(tokens, topk, experts, seed=0, sentinels=()):
    g = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(tokens, experts, generator=g).argsort(1)[:, :topk]
    for sentinel in sentinels:
        ids_TK = ids_TK.masked_fill(torch.rand(tokens, topk, generator=g) < 0.3, sentinel)
    return ids_TK


IDS = {
    "random": choose(7, 3, 5),
    "dropped": choose(7, 3, 5, sentinels=(-1, 5, 1000)),
    "all to one": torch.full((4, 1), 3),
    "all dropped": torch.full((4, 2), -1),
    "one token": torch.tensor([[4, 0]]),
    "no token": torch.zeros(0, 2, dtype=torch.int64),
    "int32": choose(5, 2, 5).int(),
}


@pytest.mark.parametrize("slots", [0, 1, 4, 6])
def test_slots_that_are_not_there_add_nothing_and_are_not_read(slots):
    """Six are routed: those past `slots` lie in somebody else's memory."""
    ids_TK = torch.tensor([[0, 1], [0, 1], [1, 0]])
    permutation = sort_by_expert(ids_TK, 2)
    x_TD = torch.randn(3, 5, requires_grad=True)
    memory = torch.full((14, 5), torch.nan)
    rows_SD = memory[4 : 4 + slots].copy_(torch.arange(1.0, slots + 1)[:, None].expand(slots, 5))
    wanted = torch.zeros(3, 5)
    for slot, chosen in enumerate(permutation.order_S[:slots].tolist()):
        wanted[chosen // 2] += slot + 1
    out_SD = permute(x_TD, permutation, slots=slots)
    assert torch.equal(out_SD, x_TD[permutation.order_S[:slots] // 2])
    assert torch.equal(torch.autograd.grad(out_SD, x_TD, rows_SD)[0], wanted)
    given_SD = rows_SD.detach().requires_grad_()
    out_TD = unpermute(given_SD, permutation)
    assert torch.equal(out_TD, wanted)
    grad_SD = torch.autograd.grad(out_TD, given_SD, wanted)[0]
    assert torch.equal(grad_SD, wanted[permutation.order_S[:slots] // 2])
    assert memory[:4].isnan().all()
    assert memory[4 + slots :].isnan().all()


@pytest.mark.parametrize("ids_TK", IDS.values(), ids=IDS)
@pytest.mark.parametrize("exact_slots", [False, True])
def test_rows_sums_and_gradients_are_those_of_the_loop(ids_TK, exact_slots):
    tokens, topk = ids_TK.shape
    order, ends = naive_order(ids_TK, 5)
    used = len(order)
    slots = used if exact_slots else tokens * topk
    permutation = sort_by_expert(ids_TK, 5)
    assert permutation.ends_E.dtype == torch.int32
    assert torch.equal(permutation.ends_E, ends)
    assert [divmod(s, topk) for s in permutation.order_S[:used].tolist()] == order

    g = torch.Generator().manual_seed(1)
    x_TD = torch.randn(tokens, 4, generator=g, requires_grad=True)
    probs_TK = torch.rand(tokens, topk, generator=g, requires_grad=True)
    grad_SD, grad_S = torch.randn(slots, 4, generator=g), torch.randn(slots, generator=g)
    grad_SD[used:], grad_S[used:] = torch.nan, torch.nan
    for _ in range(2):
        rows_SD = permute(x_TD, permutation, slots=slots)
        probs_S = permute_probs(probs_TK, permutation, slots=slots)
        assert (rows_SD.shape, probs_S.shape) == ((slots, 4), (slots,))
        gx = torch.autograd.grad(rows_SD, x_TD, grad_SD)[0]
        gp = torch.autograd.grad(probs_S, probs_TK, grad_S)[0]
        want_gx, want_gp = torch.zeros_like(x_TD), torch.zeros_like(probs_TK)
        for s, (t, k) in enumerate(order):
            assert torch.equal(rows_SD[s], x_TD[t])
            assert probs_S[s] == probs_TK[t, k]
            want_gx[t] += grad_SD[s]
            want_gp[t, k] += grad_S[s]
        torch.testing.assert_close(gx, want_gx, rtol=1e-6, atol=1e-6)
        assert torch.equal(gp, want_gp)

    rows_SD = grad_SD.clone().requires_grad_()
    out_TD = unpermute(rows_SD, permutation)
    torch.testing.assert_close(out_TD, want_gx, rtol=1e-6, atol=1e-6)
    grad_TD = torch.randn(tokens, 4, generator=g)
    back_SD = torch.autograd.grad(out_TD, rows_SD, grad_TD)[0]
    assert back_SD.shape == (slots, 4)
    for s, (t, _) in enumerate(order):
        assert torch.equal(back_SD[s], grad_TD[t])


@given(tokens=st.integers(0, 12), experts=st.integers(1, 9), topk=st.integers(1, 4), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_unpermute_is_the_adjoint_of_permute(tokens, experts, topk, seed):
    g = torch.Generator().manual_seed(seed)
    ids_TK = torch.randint(-1, experts + 1, (tokens, topk), generator=g)  # repeated and dropped ones too
    permutation = sort_by_expert(ids_TK, experts)
    used = int(permutation.ends_E[-1])
    x_TD, y_SD = torch.randn(tokens, 3, generator=g).double(), torch.randn(tokens * topk, 3, generator=g).double()
    left = (permute(x_TD, permutation)[:used] * y_SD[:used]).sum()
    y_SD[used:] = torch.nan
    right = (x_TD * unpermute(y_SD, permutation)).sum()
    assert left.item() == pytest.approx(right.item(), abs=1e-12)


def test_a_sum_over_k_in_bf16_is_rounded_once():
    """Eight rows a token, as a top-8 model has them."""
    torch.manual_seed(0)
    ids_TK = choose(64, 8, 16)
    permutation = sort_by_expert(ids_TK, 16)
    rows_SD = torch.randn(512, 32).bfloat16()
    expected = rows_SD.double()[permutation.position_TK].sum(1)
    out_TD = unpermute(rows_SD, permutation)
    assert out_TD.dtype == torch.bfloat16
    assert relative_error(out_TD, expected) < 2e-3  # 2^-9 is one rounding; summing in bf16 gives some 4e-3
    x_TD = torch.randn(64, 32).bfloat16().requires_grad_()
    grad = torch.autograd.grad(permute(x_TD, permutation), x_TD, rows_SD)[0]
    assert torch.equal(grad, out_TD)


def test_static_shapes_without_values():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        permutation = sort_by_expert(torch.zeros(6, 2, dtype=torch.int64), 4)
        x_TD = torch.empty(6, 3, requires_grad=True)
        out_TD = unpermute(permute(x_TD, permutation), permutation)
        out_TD.sum().backward()
        assert out_TD.shape == x_TD.grad.shape == (6, 3)


@pytest.mark.parametrize("ids", [torch.zeros(4, dtype=torch.int64), torch.zeros(4, 2)])
def test_what_does_not_fit_is_refused(ids):
    with pytest.raises(ValueError, match="integer ids"):
        sort_by_expert(ids, 4)

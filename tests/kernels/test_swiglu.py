"""SwiGLU against the formula written out in fp64, each gradient apart, and against finite differences."""

import pytest
import torch
import torch.nn.functional as F
from tests.poison import relative_error

from maniple.kernels.swiglu import swiglu

GPT_OSS = dict(alpha=1.702, limit=7.0, up_offset=1.0)


def naive(gate_up, probs=None, alpha=1.0, limit=None, up_offset=0.0, layout="stacked"):
    half = gate_up.shape[1] // 2
    gate, up = (gate_up[:, :half], gate_up[:, half:]) if layout == "stacked" else (gate_up[:, ::2], gate_up[:, 1::2])
    if limit is not None:
        gate = torch.minimum(gate, torch.tensor(limit).double())
        up = torch.maximum(torch.minimum(up, torch.tensor(limit).double()), torch.tensor(-limit).double())
    out = (up + up_offset) * gate / (1 + torch.exp(-alpha * gate))
    return out if probs is None else probs[:, None] * out


@pytest.mark.parametrize("layout", ["stacked", "interleaved"])
@pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["plain", "gpt-oss"])
@pytest.mark.parametrize("weighted", [False, True])
def test_result_and_each_gradient(layout, form, weighted):
    torch.manual_seed(0)
    x = 4 * torch.randn(9, 14)  # many elements are past the limit
    probs = torch.rand(9) if weighted else None
    grad = torch.randn(9, 7)
    mine = [t.clone().requires_grad_() for t in (x, probs) if t is not None]
    theirs = [t.double().requires_grad_() for t in (x, probs) if t is not None]
    expected = naive(*theirs, **form, layout=layout)
    wanted = torch.autograd.grad(expected, theirs, grad.double())
    for _ in range(2):
        out = swiglu(*mine, **form, layout=layout)
        assert relative_error(out, expected) < 1e-6
        for got, want in zip(torch.autograd.grad(out, mine, grad), wanted, strict=True):
            assert relative_error(got, want) < 1e-6


def test_plain_is_silu():
    x = torch.randn(4, 6)
    assert relative_error(swiglu(x), F.silu(x[:, :3]) * x[:, 3:]) < 1e-6


def test_limit_clamps_gate_above_only_and_up_on_both_sides():
    gate, up = torch.tensor([[9.0], [-9.0], [1.0], [1.0]]), torch.tensor([[1.0], [1.0], [9.0], [-9.0]])
    clamped_gate, clamped_up = torch.tensor([[7.0], [-9.0], [1.0], [1.0]]), torch.tensor([[1.0], [1.0], [7.0], [-7.0]])
    expected = (clamped_up + 1) * clamped_gate * torch.sigmoid(1.702 * clamped_gate)
    assert relative_error(swiglu(torch.cat([gate, up], 1), **GPT_OSS), expected) < 1e-6


def test_gradient_of_probs_is_a_finite_difference():
    torch.manual_seed(1)
    x, probs, grad = torch.randn(3, 8), torch.rand(3), torch.randn(3, 4)
    probs.requires_grad_()
    got = torch.autograd.grad(swiglu(x, probs), probs, grad)[0]
    eps = 1e-2
    for s in range(3):
        step = eps * F.one_hot(torch.tensor(s), 3)
        difference = ((swiglu(x, probs + step) - swiglu(x, probs - step)) * grad).sum() / (2 * eps)
        assert got[s].item() == pytest.approx(difference.item(), rel=1e-4, abs=1e-5)


def test_bf16_is_rounded_once_and_rows_do_not_mix():
    torch.manual_seed(2)
    x, probs = torch.randn(6, 10).bfloat16(), torch.rand(6)
    x[4:], probs[4:] = torch.nan, torch.nan
    x.requires_grad_()
    probs.requires_grad_()
    out = swiglu(x, probs)
    grad = torch.randn(6, 5).bfloat16()
    grad[4:] = torch.nan
    gx, gp = torch.autograd.grad(out, [x, probs], grad)
    assert out.dtype == gx.dtype == torch.bfloat16
    assert gp.dtype == torch.float32
    x64, p64 = x[:4].double().detach().requires_grad_(), probs[:4].double().detach().requires_grad_()
    expected = naive(x64, p64)
    wanted = torch.autograd.grad(expected, [x64, p64], grad[:4].double())
    assert torch.equal(out[:4], expected.to(torch.bfloat16))
    assert torch.equal(gx[:4], wanted[0].to(torch.bfloat16))
    assert relative_error(gp[:4], wanted[1]) < 1e-6


def test_no_rows():
    x = torch.zeros(0, 6, requires_grad=True)
    swiglu(x, torch.zeros(0)).sum().backward()
    assert x.grad.shape == (0, 6)


@pytest.mark.parametrize(
    ("x", "probs", "layout"),
    [
        (torch.zeros(2, 5), None, "stacked"),
        (torch.zeros(2, 6), torch.zeros(3), "stacked"),
        (torch.zeros(2, 6), None, "up"),
    ],
)
def test_what_does_not_fit_is_refused(x, probs, layout):
    with pytest.raises(ValueError, match="swiglu needs"):
        swiglu(x, probs, layout=layout)

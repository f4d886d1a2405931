"""Router logits: fp32 of operands in any dtype, each gradient by itself."""

from __future__ import annotations

import pytest
import torch

from maniple.kernels.routing import router_logits
from maniple.kernels.routing.logits import three_parts


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tokens", [70, 1, 0])
def test_products_and_gradients_are_those_of_fp64(dtype, tokens):
    torch.manual_seed(0)
    x_TD, weight_ED, bias_E = (torch.randn(*shape).to(dtype) for shape in ((tokens, 24), (10, 24), (10,)))
    grad_TE = torch.randn(tokens, 10)
    leaves = [tensor.clone().requires_grad_() for tensor in (x_TD, weight_ED, bias_E)]
    exact = [tensor.double().requires_grad_() for tensor in (x_TD, weight_ED, bias_E)]
    got = router_logits(*leaves)
    wanted = exact[0] @ exact[1].t() + exact[2]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5)
    for number in range(3):
        for _ in range(2):
            (a,) = torch.autograd.grad(got, leaves[number], grad_TE, retain_graph=True)
        (b,) = torch.autograd.grad(wanted, exact[number], grad_TE.double(), retain_graph=True)
        assert a.dtype == dtype
        torch.testing.assert_close(a.double(), b, rtol=2**-8 if dtype == torch.bfloat16 else 1e-5, atol=1e-5)


def test_only_what_came_is_kept():
    kept = []
    x_TD, weight_ED = (torch.randn(*shape).bfloat16().requires_grad_() for shape in ((7, 24), (10, 24)))
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        router_logits(x_TD, weight_ED)
    assert {tensor.data_ptr() for tensor in kept} == {x_TD.data_ptr(), weight_ED.data_ptr()}


def test_three_parts_are_the_number():
    x_TE = torch.randn(64, 8) * torch.logspace(-20, 20, 8)
    parts_T3E = three_parts(x_TE)
    assert parts_T3E.dtype == torch.bfloat16
    assert torch.equal(parts_T3E.double().view(64, 3, 8).sum(1), x_TE.double())

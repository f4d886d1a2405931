"""Router logits on tensor cores against fp64: as near as fp32 products are."""

from __future__ import annotations

import torch
from tests.poison import unit_error

from maniple.kernels.routing import router_logits


def test_logits_and_gradients_on_tensor_cores():
    g = torch.Generator("cuda").manual_seed(0)
    x_TD, weight_ED, grad_TE = (
        torch.randn(shape, device="cuda", generator=g) for shape in ((4099, 2048), (128, 2048), (4099, 128))
    )
    leaves = [x_TD.bfloat16().requires_grad_(), weight_ED.bfloat16().requires_grad_()]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    got, wanted = router_logits(*leaves), exact[0] @ exact[1].t()
    assert got.dtype == torch.float32
    assert unit_error(got / 2048**0.5, wanted / 2048**0.5) < 3e-6
    grads = torch.autograd.grad(got, leaves, grad_TE)
    for a, b in zip(grads, torch.autograd.grad(wanted, exact, grad_TE.double()), strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 2.1e-3 * b.norm()  # bf16's own rounding is 1.7e-3

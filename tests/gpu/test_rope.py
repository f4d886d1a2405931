"""The rotary kernel on a GPU against the reference; engines/test_rotary.py has the layer, on a CPU."""

from __future__ import annotations

import pytest
import torch

from maniple.kernels.rope import rotate


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("heads", "width", "half"), [(32, 128, 64), (4, 128, 64), (8, 64, 32), (5, 96, 20)])
def test_it_is_the_references(heads, width, half, batch):
    qkv = torch.randn(1000, batch, 3 * heads, width, device="cuda", dtype=torch.bfloat16)
    angles_SR = torch.rand(1000, half, device="cuda") * 4096
    results = []
    for kernels in ("triton", "reference"):
        x_SBHD = qkv[:, :, heads : 2 * heads].detach().requires_grad_()
        out = rotate(x_SBHD, angles_SR.cos(), angles_SR.sin(), kernels=kernels)
        out.backward(qkv[:, :, :heads])
        results.append((out.detach(), x_SBHD.grad))
    for got, wanted in zip(*results, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-2, atol=1e-2)  # a rounding of bf16
        assert (got == wanted).float().mean() > 0.999


def test_it_repeats_bit_for_bit_and_nobody_waits():
    x_SBHD = torch.randn(4096, 1, 32, 128, device="cuda", dtype=torch.bfloat16)
    cos_SR, sin_SR = torch.randn(2, 4096, 64, device="cuda")
    first = rotate(x_SBHD, cos_SR, sin_SR, kernels="triton")
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = rotate(x_SBHD, cos_SR, sin_SR, kernels="triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)

"""The rotary kernel under Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
import triton

from maniple.kernels.rope import reference
from maniple.kernels.rope import triton as kernels

assert triton.knobs.runtime.interpret, "run through test_interpreted.py"


@pytest.mark.parametrize("back", [False, True], ids=["forward", "back"])
@pytest.mark.parametrize(("heads", "half", "rest"), [(1, 4, 0), (3, 3, 0), (2, 5, 3), (5, 1, 7)])
def test_it_is_the_references(heads, half, rest, back):
    generator = torch.Generator().manual_seed(heads)
    # heads of a larger tensor, whose other parts are never read
    whole = torch.full((4, 2, heads + 2, 2 * half + rest + 1), torch.nan)
    x_SBHD = whole[:, :, 1:-1, :-1]
    x_SBHD.copy_(torch.randn(x_SBHD.shape, generator=generator))
    cos_SR, sin_SR = torch.randn(2, 4, half, generator=generator)
    got = kernels.rotate(x_SBHD, cos_SR, sin_SR, back=back)
    torch.testing.assert_close(got, reference.rotate(x_SBHD, cos_SR, sin_SR, back=back), rtol=1e-5, atol=1e-5)


def test_columns_apart_and_no_tokens():
    x_SBHD = torch.randn(3, 8, 2, 1).permute(0, 3, 2, 1)  # the last dimension is not the innermost
    cos_SR, sin_SR = torch.randn(2, 3, 4)
    wanted = reference.rotate(x_SBHD, cos_SR, sin_SR, back=False)
    torch.testing.assert_close(kernels.rotate(x_SBHD, cos_SR, sin_SR, back=False), wanted, rtol=1e-5, atol=1e-5)
    assert kernels.rotate(x_SBHD[:0], cos_SR[:0], sin_SR[:0], back=False).shape == (0, 1, 2, 8)

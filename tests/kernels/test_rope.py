"""Rotary embedding against what Megatron-Core computes, and its gradient against finite differences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

from maniple.kernels.rope import rotate


def operands(sequence: int, batch: int, heads: int, width: int, half: int, dtype=torch.float32):
    generator = torch.Generator().manual_seed(sequence * heads + width)
    x_SBHD = torch.randn(sequence, batch, heads, width, generator=generator).to(dtype)
    return x_SBHD, torch.rand(sequence, half, generator=generator) * 200 - 100


def turned(x_SBHD, angles_SR, scale=1.0):
    return rotate(x_SBHD, angles_SR.cos() * scale, angles_SR.sin() * scale)


@settings(max_examples=30, deadline=None)
@given(
    sequence=st.integers(1, 9),
    batch=st.integers(1, 3),
    heads=st.integers(1, 5),
    half=st.integers(1, 8),
    rest=st.integers(0, 5),
    scale=st.sampled_from([1.0, 1.3466]),
    strided=st.booleans(),
)
def test_it_is_megatrons(sequence, batch, heads, half, rest, scale, strided):
    x_SBHD, angles_SR = operands(sequence, batch, heads, 2 * half + rest, half)
    if strided:  # as heads lie in one projection of queries, keys and values
        x_SBHD = torch.cat([x_SBHD, x_SBHD], dim=2)[:, :, heads:]
    freqs = torch.cat([angles_SR, angles_SR], dim=-1)[:, None, None]
    mine, theirs = x_SBHD.clone().requires_grad_(), x_SBHD.double().requires_grad_()
    got = turned(mine, angles_SR, scale)
    wanted = _apply_rotary_pos_emb_bshd(theirs, freqs.double(), mscale=scale)
    assert got.is_contiguous()
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
    weights = torch.randn(got.shape, dtype=torch.float64)
    for _ in range(2):
        got.backward(weights.float(), retain_graph=True)
    wanted.backward(2 * weights)
    torch.testing.assert_close(mine.grad.double(), theirs.grad, rtol=1e-5, atol=1e-5)


def test_bf16_is_rounded_once():
    x_SBHD, angles_SR = operands(7, 2, 3, 16, 8, torch.bfloat16)
    wanted = turned(x_SBHD.float(), angles_SR).bfloat16()
    assert torch.equal(turned(x_SBHD, angles_SR), wanted)


def test_nothing_of_its_size_is_kept():
    x_SBHD, angles_SR = operands(7, 2, 3, 16, 8)
    out = turned(x_SBHD.requires_grad_(), angles_SR)
    assert [t.shape for t in out.grad_fn.saved_tensors] == [angles_SR.shape] * 2


@pytest.mark.parametrize(
    ("x", "cos", "sin", "said"),
    [
        (torch.ones(3, 4, 8), torch.ones(3, 4), torch.ones(3, 4), "rotate needs x"),
        (torch.ones(3, 1, 4, 8), torch.ones(3, 4).double(), torch.ones(3, 4), "fp32 cos and sin"),
        (torch.ones(3, 1, 4, 8), torch.ones(2, 4), torch.ones(2, 4), "do not fit"),
        (torch.ones(3, 1, 4, 8), torch.ones(3, 4), torch.ones(3, 3), "do not fit"),
        (torch.ones(3, 1, 4, 8), torch.ones(3, 5), torch.ones(3, 5), "2 R at most 8"),
    ],
)
def test_what_does_not_fit_is_refused(x, cos, sin, said):
    with pytest.raises(ValueError, match=said):
        rotate(x, cos, sin)

"""Rotary position embedding in portable Triton, one pass over memory. As `reference.py`'s function."""

from __future__ import annotations

import torch
import triton

from maniple.kernels import chips
from maniple.kernels.rope import launch
from maniple.kernels.rope.triton_kernels import rotate_kernel


def rotate(x_SBHD: torch.Tensor, cos_SR: torch.Tensor, sin_SR: torch.Tensor, *, back: bool) -> torch.Tensor:
    """As the reference's; cos and sin contiguous."""
    sequence, batch, heads, width = x_SBHD.shape
    out_SBHD = torch.empty(x_SBHD.shape, dtype=x_SBHD.dtype, device=x_SBHD.device)
    if not out_SBHD.numel():
        return out_SBHD
    half = cos_SR.shape[1]
    block, rest = launch.block(chips.target(x_SBHD), heads, half), width - 2 * half
    rotate_kernel[(sequence * batch, triton.cdiv(heads, block.heads))](
        *(x_SBHD, cos_SR, sin_SR, out_SBHD, batch, heads, width, half, *x_SBHD.stride()),
        BACK=back,
        REST=triton.next_power_of_2(rest) if rest else 0,
        HEADS=block.heads,
        PAIRS=block.pairs,
        num_warps=block.warps,
    )
    return out_SBHD

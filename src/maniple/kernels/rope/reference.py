"""Rotary position embedding in plain torch: the oracle."""

from __future__ import annotations

import torch


def rotate(x_SBHD: torch.Tensor, cos_SR: torch.Tensor, sin_SR: torch.Tensor, *, back: bool) -> torch.Tensor:
    """Heads turned, or back, which is the transpose: with the opposite sine. In fp32; contiguous, in x's dtype."""
    half = cos_SR.shape[1]
    cos, sin = cos_SR[:, None, None], (-sin_SR if back else sin_SR)[:, None, None]
    a, b, rest = x_SBHD.float().split([half, half, x_SBHD.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1).to(x_SBHD.dtype)

"""Quantized weights of released files, as numbers: float8 in blocks with a scale each, and MXFP4. What is finite."""

from __future__ import annotations

import math

import torch

# E2M1, by its four bits: the sign, two bits of exponent, one of fraction (OCP Microscaling Formats 1.0, 5.3.3)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127
MXFP4_BLOCK = 32  # numbers that share a scale


def from_fp8_blocks(data_NK: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """float8 `[N, K]` and fp32 scales `[ceil(N / block[0]), ceil(K / block[1])]` -> fp32 `[N, K]`.

    Each number times the scale of its block (DeepSeek-V3's `weight_scale_inv`).
    """
    numbers_NK = data_NK.float()
    wide = scales.float().repeat_interleave(block[1], 1)[:, : data_NK.shape[1]]
    for rows, scale in zip(numbers_NK.split(block[0]), wide, strict=True):
        rows *= scale
    return numbers_NK


def from_mxfp4(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """uint8 `[N, K / 32, 16]` and E8M0 scales `[N, K / 32]` -> fp32 `[N, K]`; two numbers a byte, the lower half first.

    Exact: the products have two significant bits. A scale of 255 is NaN (OCP Microscaling Formats 1.0, 5.4.1).
    """
    half = torch.tensor([*_E2M1, *(-value for value in _E2M1)], dtype=torch.float32, device=blocks.device)
    table = torch.stack([half.repeat(16), half.repeat_interleave(16)], dim=-1)  # the two numbers of each byte
    numbers = table[blocks.int()].flatten(-2)  # [N, K / 32, 32]
    factors = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - _E8M0_BIAS)
    factors = factors.masked_fill(scales == 0xFF, torch.nan)
    return numbers.mul_(factors[..., None]).flatten(-2)


def is_finite(x: torch.Tensor) -> bool:
    """Whether no number is NaN or infinite; a tenth of `isfinite().all()`'s time. Of one number at least."""
    return all(map(math.isfinite, torch.stack(x.aminmax()).tolist()))  # NaN is the extreme of what holds one

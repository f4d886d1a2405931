"""SwiGLU in portable Triton, one pass over memory a direction. The functions have the interface of `reference.py`.

Where `ends_G` is given, rows past its last end are neither read nor written; the gradient of probs is zero there.
"""

from __future__ import annotations

import torch
import triton

from maniple.kernels import chips
from maniple.kernels.swiglu import launch
from maniple.kernels.swiglu.triton_kernels import backward_kernel, forward_kernel


def forward(
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor | None = None,
    ends_G: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    layout: str = "stacked",
) -> torch.Tensor:
    """As the reference's."""
    gate_up_S2F = _rows_contiguous(gate_up_S2F)
    rows, f = gate_up_S2F.shape[0], gate_up_S2F.shape[1] // 2
    out_SF = gate_up_S2F.new_empty(rows, f)
    if not out_SF.numel():
        return out_SF
    block = launch.block(chips.target(gate_up_S2F), f)
    forward_kernel[(triton.cdiv(rows, block.rows),)](
        gate_up_S2F,
        None if probs_S is None else probs_S.contiguous(),
        out_SF,
        None if ends_G is None else ends_G[-1:],
        rows,
        f,
        gate_up_S2F.stride(0),
        ENDS=ends_G is not None,
        PROBS=probs_S is not None,
        ALPHA=float(alpha),
        LIMIT=limit,
        UP_OFFSET=float(up_offset),
        INTERLEAVED=layout == "interleaved",
        ROWS=block.rows,
        COLUMNS=block.columns,
        num_warps=block.warps,
    )
    return out_SF


def backward(
    grad_SF: torch.Tensor,
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor | None = None,
    ends_G: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    layout: str = "stacked",
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference's."""
    gate_up_S2F, grad_SF = _rows_contiguous(gate_up_S2F), _rows_contiguous(grad_SF)
    rows, f = grad_SF.shape
    grad_x_S2F = torch.empty_like(gate_up_S2F, memory_format=torch.contiguous_format)
    grad_probs_S = None if probs_S is None else torch.empty_like(probs_S, memory_format=torch.contiguous_format)
    if not rows:
        return grad_x_S2F, grad_probs_S
    block = launch.block(chips.target(gate_up_S2F), f)
    backward_kernel[(triton.cdiv(rows, block.rows),)](
        grad_SF,
        gate_up_S2F,
        None if probs_S is None else probs_S.contiguous(),
        grad_x_S2F,
        grad_probs_S,
        None if ends_G is None else ends_G[-1:],
        rows,
        f,
        grad_SF.stride(0),
        gate_up_S2F.stride(0),
        ENDS=ends_G is not None,
        PROBS=probs_S is not None,
        ALPHA=float(alpha),
        LIMIT=limit,
        UP_OFFSET=float(up_offset),
        INTERLEAVED=layout == "interleaved",
        ROWS=block.rows,
        COLUMNS=block.columns,
        num_warps=block.warps,
    )
    return grad_x_S2F, grad_probs_S


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()

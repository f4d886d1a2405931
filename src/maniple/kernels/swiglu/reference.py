"""Oracle of SwiGLU: the formula and its derivatives in fp32."""

from __future__ import annotations

import torch


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
    """See `swiglu`; `ends_G` is not needed, since rows do not mix.

    GPT-OSS's form is `(up + 1) * gate * sigmoid(1.702 * gate)` with both clamped at 7.
    """
    gate_SF, up_SF = _halves(gate_up_S2F, layout)
    if limit is not None:
        gate_SF, up_SF = gate_SF.clamp(max=limit), up_SF.clamp(-limit, limit)
    out_SF = (up_SF + up_offset) * gate_SF * torch.sigmoid(alpha * gate_SF)
    if probs_S is not None:
        out_SF = out_SF * probs_S.float()[:, None]
    return out_SF.to(gate_up_S2F.dtype)


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
    """Gradients of gate_up `[S, 2F]` and of probs `[S]` (None without probs), each in its own dtype; tail undefined.

    With `a = sigmoid(alpha * gate)`, gate and up clamped: d_up = grad * p * gate * a and
    d_gate = grad * p * (up + up_offset) * a * (1 + alpha * gate * (1 - a)), zero beyond the limit, by the product rule
    and a' = a (1 - a).
    """
    gate_SF, up_SF = _halves(gate_up_S2F, layout)
    gate_moves_SF = up_moves_SF = torch.ones((), dtype=torch.bool, device=gate_SF.device)
    if limit is not None:
        gate_moves_SF, up_moves_SF = gate_SF <= limit, up_SF.abs() <= limit
        gate_SF, up_SF = gate_SF.clamp(max=limit), up_SF.clamp(-limit, limit)
    a_SF = torch.sigmoid(alpha * gate_SF)
    grad_out_SF = grad_SF.float()
    grad_probs_S = None
    if probs_S is not None:
        grad_probs_S = (grad_out_SF * (up_SF + up_offset) * gate_SF * a_SF).sum(1).to(probs_S.dtype)
        grad_out_SF = grad_out_SF * probs_S.float()[:, None]
    grad_gate_SF = grad_out_SF * (up_SF + up_offset) * a_SF * (1 + alpha * gate_SF * (1 - a_SF)) * gate_moves_SF
    grad_up_SF = grad_out_SF * gate_SF * a_SF * up_moves_SF
    grad_S2F = torch.stack([grad_gate_SF, grad_up_SF], -1 if layout == "interleaved" else 1).flatten(1)
    return grad_S2F.to(gate_up_S2F.dtype), grad_probs_S


def _halves(gate_up_S2F: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Gate and up in fp32, `[S, F]` each."""
    x_S2F = gate_up_S2F.float()
    return x_S2F.chunk(2, dim=-1) if layout == "stacked" else (x_S2F[:, 0::2], x_S2F[:, 1::2])

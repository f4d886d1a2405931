"""Oracle of SwiGLU: the formula in fp32, its gradient by autograd of the formula."""

from __future__ import annotations

import torch


def forward(
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    layout: str = "stacked",
) -> torch.Tensor:
    """See `swiglu`. GPT-OSS's form is `(up + 1) * gate * sigmoid(1.702 * gate)` with both clamped at 7."""
    x_S2F = gate_up_S2F.float()
    gate_SF, up_SF = x_S2F.chunk(2, dim=-1) if layout == "stacked" else (x_S2F[:, 0::2], x_S2F[:, 1::2])
    if limit is not None:
        gate_SF, up_SF = gate_SF.clamp(max=limit), up_SF.clamp(-limit, limit)
    out_SF = (up_SF + up_offset) * gate_SF * torch.sigmoid(alpha * gate_SF)
    if probs_S is not None:
        out_SF = out_SF * probs_S.float()[:, None]
    return out_SF.to(gate_up_S2F.dtype)


def backward(
    grad_SF: torch.Tensor, gate_up_S2F: torch.Tensor, probs_S: torch.Tensor | None = None, **settings
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of gate_up `[S, 2F]` and of probs `[S]` (None without probs), each in its own dtype; tail undefined."""
    with torch.enable_grad():
        inputs = [t.detach().requires_grad_() for t in (gate_up_S2F, probs_S) if t is not None]
        out_SF = forward(*inputs, **settings)
        grads = torch.autograd.grad(out_SF, inputs, grad_SF)
    return grads[0], grads[1] if probs_S is not None else None

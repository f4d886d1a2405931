"""SwiGLU and its gradient quantized, as two operations one after the other."""

from __future__ import annotations

import torch

from maniple.kernels import registry
from maniple.kernels.quantize import ops
from maniple.kernels.quantize.passed import How


def forward(
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor,
    ends_G: torch.Tensor,
    how: How,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """`quantize/reference.rows` of SwiGLU's result."""
    swiglu = registry.use("swiglu", "bf16", gate_up_S2F.device.type)
    act_SF = swiglu.forward(gate_up_S2F, probs_S, ends_G)
    return ops.quantize_rows(act_SF, ends_G, None, *how, None)


def backward(
    grad_SF: torch.Tensor,
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor,
    ends_G: torch.Tensor,
    how: How,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same of gate_up's gradient, and the gradient of probs `[S]`."""
    swiglu = registry.use("swiglu", "bf16", gate_up_S2F.device.type)
    grad_S2F, grad_probs_S = swiglu.backward(grad_SF, gate_up_S2F, probs_S, ends_G)
    made = ops.quantize_rows(grad_S2F, ends_G, None, *how, None)
    return *made, grad_probs_S

"""SwiGLU with the routing weight folded in. `swiglu` is the public, differentiable function.

An implementation is an object with the functions of `reference.py`: `forward` and `backward`.
"""

from __future__ import annotations

from typing import Any, Literal

import torch

from maniple.kernels import registry
from maniple.kernels.swiglu import reference

__all__ = ["swiglu"]

registry.register("swiglu", "reference", {"bf16"}, registry.ANY_DEVICE, reference)


def swiglu(
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    layout: Literal["stacked", "interleaved"] = "stacked",
    kernels: str | None = None,
) -> torch.Tensor:
    """`probs * (up + up_offset) * gate * sigmoid(alpha * gate)`, fp32 inside; `[S, F]` in gate_up's dtype.

    gate_up_S2F: `[S, 2F]`, gate columns then up columns ("stacked") or alternating, gate first ("interleaved").
    probs_S: `[S]`, any float dtype, or None for 1. With `limit` gate is clamped above at it and up on both sides,
    before anything else; a clamped element has no gradient beyond the limit. alpha 1.702, limit 7, up_offset 1 is
    GPT-OSS's. Rows do not mix, so that a tail of NaN rows stays in the tail. Raises ValueError for shapes that do not
    agree.
    """
    if gate_up_S2F.dim() != 2 or gate_up_S2F.shape[1] % 2 or layout not in ("stacked", "interleaved"):
        raise ValueError(f"swiglu needs [S, 2F], stacked or interleaved, not {list(gate_up_S2F.shape)}, {layout!r}")
    if probs_S is not None and probs_S.shape != gate_up_S2F.shape[:1]:
        raise ValueError(f"swiglu needs probs of shape [{gate_up_S2F.shape[0]}], not {list(probs_S.shape)}")
    implementation = registry.use("swiglu", "bf16", gate_up_S2F.device.type, kernels)
    settings: dict[str, Any] = dict(alpha=alpha, limit=limit, up_offset=up_offset, layout=layout)
    return _SwiGLU.apply(gate_up_S2F, probs_S, implementation, settings)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_S2F, probs_S, implementation, settings):
        ctx.save_for_backward(gate_up_S2F, probs_S)
        ctx.settings = implementation, settings
        return implementation.forward(gate_up_S2F, probs_S, **settings)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SF):
        implementation, settings = ctx.settings
        gate_up_S2F, probs_S = ctx.saved_tensors
        return *implementation.backward(grad_SF, gate_up_S2F, probs_S, **settings), None, None

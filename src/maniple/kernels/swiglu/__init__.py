"""SwiGLU with the routing weight folded in. `swiglu` is the public, differentiable function.

An implementation is an object with the functions of `reference.py`: `forward` and `backward`. PyTorch knows them as
`torch.ops.maniple.swiglu` and `swiglu_backward`. `quantized.py` has what is between two quantized products.
"""

from __future__ import annotations

from typing import Literal

import torch

from maniple.kernels import chips, custom_ops, registry
from maniple.kernels.swiglu import quantized, reference

__all__ = ["quantized", "swiglu"]


_triton = registry.LazyModule("maniple.kernels.swiglu.triton")
registry.register("swiglu", "reference", {"bf16"}, registry.ANY_DEVICE, reference)
registry.register("swiglu", "triton", {"bf16"}, {"cuda"}, _triton, preference=1, reason_unavailable=chips.no_triton)


def swiglu(
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor | None = None,
    *,
    ends_G: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    layout: Literal["stacked", "interleaved"] = "stacked",
    kernels: str | None = None,
) -> torch.Tensor:
    """`probs * (up + up_offset) * gate * sigmoid(alpha * gate)`, fp32 inside; `[S, F]` in gate_up's dtype.

    gate_up_S2F: `[S, 2F]`, gate columns then up columns ("stacked") or alternating, gate first ("interleaved").
    probs_S: `[S]`, any float dtype, or None for 1. ends_G: int32 `[G]`; where it is given, rows past `ends_G[-1]` may
    be skipped: the result's and the gradients' are then undefined. With `limit` gate is clamped above at it and up on
    both sides, before anything else; a clamped element has no gradient beyond the limit. alpha 1.702, limit 7,
    up_offset 1 is GPT-OSS's. Rows do not mix, so that a tail of NaN rows stays in the tail. Raises ValueError for
    shapes that do not agree.
    """
    if gate_up_S2F.dim() != 2 or gate_up_S2F.shape[1] % 2 or layout not in ("stacked", "interleaved"):
        raise ValueError(f"swiglu needs [S, 2F], stacked or interleaved, not {list(gate_up_S2F.shape)}, {layout!r}")
    if probs_S is not None and probs_S.shape != gate_up_S2F.shape[:1]:
        raise ValueError(f"swiglu needs probs of shape [{gate_up_S2F.shape[0]}], not {list(probs_S.shape)}")
    if ends_G is not None and (ends_G.dim() != 1 or ends_G.dtype != torch.int32 or not ends_G.shape[0]):
        raise ValueError(f"swiglu needs int32 ends of shape [G], not {ends_G.dtype} {list(ends_G.shape)}")
    call = torch.ops.maniple.swiglu if custom_ops.named(gate_up_S2F) else _SwiGLU.apply
    return call(gate_up_S2F, probs_S, ends_G, alpha, limit, up_offset, layout, kernels)


def forward(x_S2F, probs_S, ends_G, alpha, limit, up_offset, layout, kernels) -> torch.Tensor:
    """The operator `maniple::swiglu`: `[S, F]`."""
    implementation = registry.use("swiglu", "bf16", x_S2F.device.type, kernels)
    return implementation.forward(x_S2F, probs_S, ends_G, alpha=alpha, limit=limit, up_offset=up_offset, layout=layout)


def backward(
    grad_SF, x_S2F, probs_S, ends_G, alpha, limit, up_offset, layout, kernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """The operator `maniple::swiglu_backward`: gradients of gate_up and of probs (`[0]` without probs)."""
    implementation = registry.use("swiglu", "bf16", x_S2F.device.type, kernels)
    grad_x_S2F, grad_probs_S = implementation.backward(
        grad_SF, x_S2F, probs_S, ends_G, alpha=alpha, limit=limit, up_offset=up_offset, layout=layout
    )
    return grad_x_S2F, x_S2F.new_empty(0) if grad_probs_S is None else grad_probs_S


def _fake_backward(grad_SF, x_S2F, probs_S, *settings):
    grad_probs_S = x_S2F.new_empty(0) if probs_S is None else torch.empty_like(probs_S)
    return torch.empty_like(x_S2F, memory_format=torch.contiguous_format), grad_probs_S


def _save(ctx, inputs, output) -> None:
    gate_up_S2F, probs_S, ends_G, *settings = inputs
    ctx.save_for_backward(gate_up_S2F, probs_S, ends_G)
    ctx.settings = settings


def _gradients(ctx, grad_SF, call):
    gate_up_S2F, probs_S, ends_G = ctx.saved_tensors
    grad_x_S2F, grad_probs_S = call(grad_SF, gate_up_S2F, probs_S, ends_G, *ctx.settings)
    return grad_x_S2F, grad_probs_S if probs_S is not None else None, None, None, None, None, None, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        _save(ctx, inputs, None)
        return forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SF):
        return _gradients(ctx, grad_SF, backward)


_SETTINGS = "float alpha, float? limit, float up_offset, str layout, str? kernels"
custom_ops.define(
    f"swiglu(Tensor gate_up, Tensor? probs, Tensor? ends, {_SETTINGS}) -> Tensor",
    forward,
    lambda x_S2F, *settings: x_S2F.new_empty(x_S2F.shape[0], x_S2F.shape[1] // 2),
)
custom_ops.define(
    f"swiglu_backward(Tensor grad, Tensor gate_up, Tensor? probs, Tensor? ends, {_SETTINGS}) -> (Tensor, Tensor)",
    backward,
    _fake_backward,
)
custom_ops.differentiate(
    "swiglu", lambda ctx, grad_SF: _gradients(ctx, grad_SF, torch.ops.maniple.swiglu_backward), _save
)

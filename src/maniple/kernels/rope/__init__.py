"""Rotary position embedding of queries and keys, one pass a direction. `rotate` is the public function.

An implementation is an object with the function of `reference.py`.
"""

from __future__ import annotations

import torch

from maniple.kernels import chips, registry
from maniple.kernels.rope import reference

__all__ = ["rotate"]

_triton = registry.LazyModule("maniple.kernels.rope.triton")
registry.register("rope", "reference", {"bf16"}, registry.ANY_DEVICE, reference)
registry.register("rope", "triton", {"bf16"}, {"cuda"}, _triton, preference=1, reason_unavailable=chips.no_triton)


def rotate(
    x_SBHD: torch.Tensor, cos_SR: torch.Tensor, sin_SR: torch.Tensor, *, kernels: str | None = None
) -> torch.Tensor:
    """Turns elements i and R + i of each head: `(a cos - b sin, b cos + a sin)`; those from 2 R on are copied.

    x: `[S, B, H, D]` of any float dtype, whatever its strides. cos and sin of position s's angles: fp32 `[S, R]`, times
    YaRN's factor if there is one; 2 R <= D. fp32 inside; `[S, B, H, D]` in x's dtype, contiguous. Su et al., RoFormer
    (2021), in the order of halves that GPT-NeoX has. Nothing of x's size is kept for backward. Raises ValueError for
    shapes that do not agree.
    """
    tables = [cos_SR, sin_SR]
    if x_SBHD.dim() != 4 or any(table.dim() != 2 or table.dtype != torch.float32 for table in tables):
        raise ValueError(
            f"rotate needs x [S, B, H, D] and fp32 cos and sin [S, R], not {list(x_SBHD.shape)} and "
            f"{[(table.dtype, list(table.shape)) for table in tables]}"
        )
    if not cos_SR.shape == sin_SR.shape == (x_SBHD.shape[0], cos_SR.shape[1]) or 2 * cos_SR.shape[1] > x_SBHD.shape[3]:
        raise ValueError(
            f"cos {list(cos_SR.shape)} and sin {list(sin_SR.shape)} do not fit x {list(x_SBHD.shape)}: both are "
            f"[S, R], 2 R at most {x_SBHD.shape[3]}"
        )
    implementation = registry.use("rope", "bf16", x_SBHD.device.type, kernels)
    return _Rotate.apply(x_SBHD, cos_SR.contiguous(), sin_SR.contiguous(), implementation)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SBHD, cos_SR, sin_SR, implementation):
        ctx.save_for_backward(cos_SR, sin_SR)
        ctx.implementation = implementation
        return implementation.rotate(x_SBHD, cos_SR, sin_SR, back=False)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SBHD):
        return ctx.implementation.rotate(grad_SBHD, *ctx.saved_tensors, back=True), None, None, None

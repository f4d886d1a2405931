"""Operations that torch computes with one kernel on a GPU, and from several others for meta tensors.

The others keep what the one does not: all scores of attention, fp32 copies of what is normalised. A dry run that took
them would count memory that no GPU needs, so that it goes the GPU's way here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

_HALVES = (torch.bfloat16, torch.float16)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """`F.scaled_dot_product_attention` as flash, cuDNN's or memory-efficient attention, by what torch's kernels take on
    sm_90 and sm_100. Grouped keys are repeated in fp32 alone, as `fused_attention` of the engine does there."""
    heads = {t.shape[-1] for t in (query, key, value)}
    if attn_mask is None and query.dtype in _HALVES and len(heads) == 1 and max(heads) <= 256:
        return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[
            0
        ]
    if enable_gqa and query.dtype in _HALVES:
        return torch.ops.aten._scaled_dot_product_cudnn_attention(
            query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in (key, value))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


class _RMSNorm(torch.autograd.Function):
    """Keeps its input, which is there anyway, and one fp32 number a row."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight, torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


def rms_norm(
    x: torch.Tensor, normalized_shape: tuple[int, ...], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    """`F.rms_norm`; from parts where types differ, as on a GPU."""
    if weight is None or weight.dtype != x.dtype:
        return F.rms_norm(x, normalized_shape, weight, eps)
    return _RMSNorm.apply(x, weight)


BY_FUNCTION: dict[Callable, Callable] = {F.scaled_dot_product_attention: attention, F.rms_norm: rms_norm}

"""The experts of one rank over expert-sorted rows: grouped GEMM, SwiGLU with the routing weight, grouped GEMM.

The activation is fused behind the first product in bf16, and in the other recipes with the quantization of what the
second product takes, where there are kernels for it; else each is an operation of its own.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from maniple.kernels.forgotten import forget, forgetting, recomputed
from maniple.kernels.grouped_gemm import grouped_gemm, grouped_gemm_swiglu
from maniple.kernels.grouped_gemm.low_precision import quantized_grouped_gemm
from maniple.kernels.grouped_gemm.low_precision_swiglu import kept_again, quantized_grouped_gemm_swiglu
from maniple.kernels.quantize import QuantizedWeight

if TYPE_CHECKING:
    from maniple.models.card import MoE


@dataclass(frozen=True)
class ExpertActivation:
    """`(up + up_offset) * gate * sigmoid(alpha * gate)`, gate clamped above at `limit` and up on both sides."""

    alpha: float = 1.0
    limit: float | None = None
    up_offset: float = 0.0
    layout: Literal["stacked", "interleaved"] = "stacked"  # how gate and up share w13's 2F rows

    @classmethod
    def from_card(cls, moe: MoE) -> ExpertActivation:
        """The activation of a model card's `moe` section; weights are kept stacked, whatever a release does."""
        if moe.activation == "swiglu":
            return cls()
        return cls(alpha=moe.activation_alpha, limit=moe.activation_limit, up_offset=moe.activation_up_offset)


def expert_mlp(
    rows_SD: torch.Tensor,
    probs_S: torch.Tensor,
    ends_G: torch.Tensor,
    w13_GFD: torch.Tensor,
    w2_GDF: torch.Tensor,
    *,
    b13_GF: torch.Tensor | None = None,
    b2_GD: torch.Tensor | None = None,
    activation: ExpertActivation | None = None,
    recipe: str = "bf16",
    dtype: torch.dtype = torch.float8_e4m3fn,
    caches: tuple[QuantizedWeight, QuantizedWeight] | None = None,
    kernels: str | None = None,
    fuse_wgrad_accumulation: bool = False,
    splits: list[int] | None = None,
    recompute: Literal["none", "activation", "all"] = "none",
) -> torch.Tensor:
    """Weighted outputs `[S, D]`: `prob * (w2 @ act(w13 @ row + b13) + b2)`, with the matrices of the row's expert.

    rows_SD and ends_G keep the grouped-rows contract (`maniple.kernels`); rows past `ends_G[-1]` of the result are
    undefined. w13: `[G, 2F, D]`; w2: `[G, D, F]`; b13: `[G, 2F]`; b2: `[G, D]`. probs_S fp32 `[S]` multiplies the
    activation (and b2) rather than the result: the same value, and its gradient needs no saved output. dtype: the
    float8 of recipes other than bf16; caches: of w13 and w2 in such a recipe. The other arguments are those of
    `grouped_gemm`. Raises ValueError for caches with bf16.

    recompute: what backward does not keep. "activation": the activation (in another recipe, its quantized form), which
    is computed again from gate and up; "all": nothing but rows_SD and probs_S are kept.
    """
    if recompute == "all":
        arguments: dict[str, Any] = dict(b13_GF=b13_GF, b2_GD=b2_GD, activation=activation, recipe=recipe, dtype=dtype)
        arguments |= dict(caches=caches, kernels=kernels, splits=splits)
        arguments["fuse_wgrad_accumulation"] = fuse_wgrad_accumulation
        return recomputed(
            lambda rows_SD, probs_S: expert_mlp(rows_SD, probs_S, ends_G, w13_GFD, w2_GDF, **arguments),
            rows_SD,
            probs_S,
        )
    if recipe == "bf16" and caches is not None:
        raise ValueError("recipe bf16 quantizes nothing: leave caches out, or name another recipe")
    activation = activation or ExpertActivation()
    shared: dict[str, Any] = dict(
        recipe=recipe, kernels=kernels, splits=splits, fuse_wgrad_accumulation=fuse_wgrad_accumulation
    )
    form: dict[str, Any] = dict(
        bias_G2F=b13_GF,
        probs_S=probs_S,
        alpha=activation.alpha,
        limit=activation.limit,
        up_offset=activation.up_offset,
        gate_up=activation.layout,
    )
    if recipe != "bf16":
        cache13, cache2 = caches or (None, None)
        shared["dtype"] = dtype
        form |= dict(turned=torch.is_grad_enabled() and w2_GDF.requires_grad, weight_cache=cache13)
        hidden_SF, passed = quantized_grouped_gemm_swiglu(rows_SD, w13_GFD, ends_G, **form, **shared)
        shared |= dict(weight_cache=cache2, passed_x=passed)
    else:
        hidden_SF, passed = grouped_gemm_swiglu(rows_SD, w13_GFD, ends_G, **form, **shared), None
    kept = kept_again(hidden_SF, passed) if recompute == "activation" else None
    with forgetting() if kept is not None else nullcontext():
        if kept is not None:
            forget(*kept)
        product = grouped_gemm if recipe == "bf16" else quantized_grouped_gemm
        scale_S = probs_S if b2_GD is not None else None
        return product(hidden_SF, w2_GDF, ends_G, bias_GN=b2_GD, bias_scale_S=scale_S, **shared)

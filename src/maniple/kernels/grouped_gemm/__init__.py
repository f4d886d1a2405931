"""Grouped GEMM: one matrix an expert, rows sorted by expert. The public functions are differentiable.

`grouped_gemm` multiplies; `grouped_gemm_swiglu` is an expert's first layer with its activation. An implementation is an
object with the functions of `reference.py`; one that does not serve all operands says so with
`refusal(x, w, layout, gathers, gate_up, grad_columns)`. `ops.py` has the operators that PyTorch knows by
name.
"""

from __future__ import annotations

from typing import Literal

import torch

from maniple.kernels import chips, custom_ops, main_grad, registry
from maniple.kernels.grouped_gemm import low_precision, ops, reference
from maniple.kernels.grouped_gemm.operands import check_operands
from maniple.kernels.quantize import QuantizedWeight

__all__ = ["grouped_gemm", "grouped_gemm_swiglu"]


_triton = registry.LazyModule("maniple.kernels.grouped_gemm.triton")
_hopper = registry.LazyModule("maniple.kernels.grouped_gemm.hopper")
for _op in ("grouped_gemm", "grouped_gemm_swiglu"):
    registry.register(_op, "reference", {"bf16"}, registry.ANY_DEVICE, reference)
    registry.register(_op, "triton", {"bf16"}, {"cuda"}, _triton, preference=1, reason_unavailable=chips.no_triton)
    registry.register(
        _op,
        "hopper",
        {"bf16"},
        {"cuda"},
        _hopper,
        preference=2,
        reason_unavailable=chips.no_hopper,
        refuses=lambda *operands: _hopper.refusal(*operands),
    )
_hopper_swiglu = registry.LazyModule("maniple.kernels.grouped_gemm.hopper_swiglu")
registry.register(
    "grouped_gemm_swiglu",
    "hopper_fused",
    {"bf16"},
    {"cuda"},
    _hopper_swiglu,
    preference=3,
    reason_unavailable=chips.no_hopper,
    refuses=lambda *operands: _hopper_swiglu.refusal(*operands),
    defers=lambda *operands: _hopper_swiglu.defers(*operands),
)


def grouped_gemm(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
    source_S: torch.Tensor | None = None,
    slots_TK: torch.Tensor | None = None,
    layout: Literal["nk", "kn"] = "nk",
    zero_tail: bool = False,
    fuse_wgrad_accumulation: bool = False,
    recipe: str = "bf16",
    weight_cache: QuantizedWeight | None = None,
    kernels: str | None = None,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """`out[s] = x[s] @ w[g]ᵀ + bias_scale[s] * bias[g]` for every row s of group g; `[S, N]` in x's dtype.

    x_SK: `[S, K]`. w_G: `[G, N, K]` with layout "nk" or `[G, K, N]` with "kn", x's dtype. ends_G: int32 `[G]`,
    inclusive prefix ends. bias_GN: `[G, N]`; bias_scale_S: `[S]` (1 if None). Rows past `ends_G[-1]` of x are never
    read and of the result are undefined, or zero with `zero_tail`; in backward the same holds for the gradients of
    `out` and of x.

    source_S: int32 or int64 `[S]`; x is then `[T, K]` and `x[source[s]]` is meant where `x[s]` stands above (zeros
    where the source is none of T), so that rows need no copy in expert order. The gradient of x sums a token's rows in
    fp32 in the order of slots_TK, integers `[T, C]`: the slots that a token was gathered to (negative, or past the
    groups: none). A `Permutation` of `maniple.kernels.permute` has both: `order_S // K` and `position_TK`.

    fuse_wgrad_accumulation: backward adds the weight's gradient to `w_G.main_grad` (fp32, w's shape) in place (writes
    it there if `w_G.overwrite_main_grad`, which is False thereafter; a compiled graph only adds), sets
    `w_G.grad_added_to_main_grad = True` (in a compiled graph forward does) and leaves a `.grad` without meaning, as
    Megatron-Core's DDP expects: `maniple.kernels.main_grad`.
    recipe: "bf16" multiplies x as it is. "fp8", "fp8_block" and "mxfp8" quantize x, w and the result's gradient first,
    with what weight_cache keeps of w between optimizer steps; `low_precision.quantized_grouped_gemm` has their other
    options.
    kernels: an implementation's name, or None or "auto" for the best that serves these operands. splits: the sizes of
    the groups where the host knows them. Raises UserError if no implementation serves the recipe, ValueError for
    shapes that do not agree, or for `source_S` without `slots_TK` where x needs a gradient.
    """
    if recipe != "bf16":
        return low_precision.quantized_grouped_gemm(
            x_SK,
            w_G,
            ends_G,
            recipe=recipe,
            layout=layout,
            bias_GN=bias_GN,
            bias_scale_S=bias_scale_S,
            source_S=source_S,
            slots_TK=slots_TK,
            zero_tail=zero_tail,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            weight_cache=weight_cache,
            kernels=kernels,
            splits=splits,
        )
    if weight_cache is not None:
        raise ValueError("recipe bf16 quantizes nothing: leave weight_cache out, or name another recipe")
    check_operands(x_SK, w_G, ends_G, source_S, slots_TK, layout, bias_GN, bias_scale_S)
    main_grad_G = _main_grad(w_G, fuse_wgrad_accumulation)
    call = torch.ops.maniple.grouped_gemm if custom_ops.named(x_SK) else ops.GroupedGemm.apply
    settings = layout, zero_tail, recipe, kernels, splits
    return call(x_SK, w_G, ends_G, bias_GN, bias_scale_S, source_S, slots_TK, main_grad_G, *settings)


def grouped_gemm_swiglu(
    x_SK: torch.Tensor,
    w13_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    bias_G2F: torch.Tensor | None = None,
    probs_S: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    gate_up: Literal["stacked", "interleaved"] = "stacked",
    source_S: torch.Tensor | None = None,
    slots_TK: torch.Tensor | None = None,
    layout: Literal["nk", "kn"] = "nk",
    zero_tail: bool = False,
    fuse_wgrad_accumulation: bool = False,
    recipe: str = "bf16",
    kernels: str | None = None,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """`swiglu(grouped_gemm(x, w13, bias), probs)` as one operation; `[S, F]` in x's dtype, its tail as grouped_gemm's.

    w13_G: `[G, 2F, K]` or, with layout "kn", `[G, K, 2F]`; bias_G2F: `[G, 2F]`. gate_up says how gate and up share 2F:
    gate first ("stacked") or alternating. probs_S: `[S]`, the routing weight, multiplies the activation; alpha, limit
    and up_offset are those of `maniple.kernels.swiglu`. The product is rounded to x's dtype before the activation, and
    kept so for backward (`[S, 2F]`) where a gradient is needed. Other arguments and errors: see `grouped_gemm`.

    kernels: "triton" and "hopper_fused" compute it in one kernel, "hopper" with its product and then the SwiGLU kernel;
    backward is one SwiGLU kernel and the product's gradients.
    """
    slots, n = check_operands(x_SK, w13_G, ends_G, source_S, slots_TK, layout, bias_G2F)
    if n % 2 or gate_up not in ("stacked", "interleaved"):
        raise ValueError(f"w13 needs 2F gate and up columns, stacked or interleaved, not {n}, {gate_up!r}")
    if probs_S is not None and probs_S.shape != (slots,):
        raise ValueError(f"probs needs shape [{slots}], not {list(probs_S.shape)}")
    main_grad_G = _main_grad(w13_G, fuse_wgrad_accumulation)
    leaves = (x_SK, w13_G, bias_G2F, probs_S)
    keep = torch.is_grad_enabled() and any(leaf is not None and leaf.requires_grad for leaf in leaves)
    call = torch.ops.maniple.grouped_gemm_swiglu if custom_ops.named(x_SK) else ops.GroupedGemmSwiGLU.apply
    activation = float(alpha), None if limit is None else float(limit), float(up_offset), gate_up
    settings = *activation, layout, keep, zero_tail, recipe, kernels, splits
    return call(x_SK, w13_G, ends_G, bias_G2F, probs_S, source_S, slots_TK, main_grad_G, *settings)[0]


def _main_grad(w_G: torch.Tensor, fuse: bool) -> torch.Tensor | None:
    if not fuse:
        return None
    main_grad_G = getattr(w_G, "main_grad", None)
    if main_grad_G is None:
        raise ValueError("fuse_wgrad_accumulation needs a weight with a main_grad")
    if torch.compiler.is_compiling() and w_G.requires_grad:
        if not main_grad.adds(w_G):
            raise ValueError("a compiled graph adds gradients: zero main_grad, and leave overwrite_main_grad unset")
        w_G.grad_added_to_main_grad = True  # a compiled backward is a graph, and sets no attributes
    return main_grad_G

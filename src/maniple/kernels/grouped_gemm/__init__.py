"""Grouped GEMM: one matrix an expert, rows sorted by expert. `grouped_gemm` is the public, differentiable function.

An implementation is an object with the functions of `reference.py`: `forward`, `dgrad`, `wgrad`, `bias_grad`. One that
does not serve all operands says so with `refusal(x, w, layout)`.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

from maniple.kernels import registry
from maniple.kernels.grouped_gemm import reference

__all__ = ["grouped_gemm"]


def _no_triton() -> str | None:
    return None if importlib.util.find_spec("triton") else "needs the triton package, and it is not installed"


def _no_hopper() -> str | None:
    if (reason := _no_triton()) is not None:
        return reason
    if torch.version.hip or not torch.cuda.is_available():
        return "needs a Hopper GPU (sm_90)"
    major, minor = torch.cuda.get_device_capability()
    return None if (major, minor) == (9, 0) else f"needs a Hopper GPU (sm_90), and this one is sm_{major}{minor}"


_triton = registry.LazyModule("maniple.kernels.grouped_gemm.triton")
_hopper = registry.LazyModule("maniple.kernels.grouped_gemm.hopper")
registry.register("grouped_gemm", "reference", {"bf16"}, registry.ANY_DEVICE, reference)
registry.register("grouped_gemm", "triton", {"bf16"}, {"cuda"}, _triton, preference=1, reason_unavailable=_no_triton)
registry.register(
    "grouped_gemm",
    "hopper",
    {"bf16"},
    {"cuda"},
    _hopper,
    preference=2,
    reason_unavailable=_no_hopper,
    refuses=lambda *operands: _hopper.refusal(*operands),
)


def grouped_gemm(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
    layout: Literal["nk", "kn"] = "nk",
    zero_tail: bool = False,
    fuse_wgrad_accumulation: bool = False,
    recipe: str = "bf16",
    kernels: str | None = None,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """`out[s] = x[s] @ w[g]ᵀ + bias_scale[s] * bias[g]` for every row s of group g; `[S, N]` in x's dtype.

    x_SK: `[S, K]`. w_G: `[G, N, K]` with layout "nk" or `[G, K, N]` with "kn", x's dtype. ends_G: int32 `[G]`,
    inclusive prefix ends. bias_GN: `[G, N]`; bias_scale_S: `[S]` (1 if None). Rows past `ends_G[-1]` of x are never
    read and of the result are undefined, or zero with `zero_tail`; in backward the same holds for the gradients of
    `out` and of x.

    fuse_wgrad_accumulation: backward adds the weight's gradient to `w_G.main_grad` (fp32, w's shape) in place, sets
    `w_G.grad_added_to_main_grad = True` and returns a gradient of undefined values, as Megatron-Core's DDP expects.
    kernels: an implementation's name, or None or "auto" for the best that serves these operands. splits: the sizes of
    the groups where the host knows them. Raises UserError if no implementation serves the recipe, ValueError for
    shapes that do not agree.
    """
    _check(x_SK, w_G, ends_G, bias_GN, bias_scale_S, layout)
    if fuse_wgrad_accumulation and getattr(w_G, "main_grad", None) is None:
        raise ValueError("fuse_wgrad_accumulation needs a weight with a main_grad")
    operands = x_SK.detach(), w_G.detach(), layout
    implementation = registry.use("grouped_gemm", recipe, x_SK.device.type, kernels, operands)
    return _GroupedGemm.apply(
        x_SK, w_G, ends_G, bias_GN, bias_scale_S, implementation, layout, zero_tail, fuse_wgrad_accumulation, splits
    )


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_SK, w_G, ends_G, bias_GN, bias_scale_S, implementation, layout, zero_tail, fuse, splits):
        ctx.save_for_backward(x_SK, w_G, ends_G, bias_GN, bias_scale_S)
        ctx.settings = implementation, layout, zero_tail, fuse, splits
        return implementation.forward(
            x_SK,
            w_G,
            ends_G,
            bias_GN=bias_GN,
            bias_scale_S=bias_scale_S,
            layout=layout,
            zero_tail=zero_tail,
            splits=splits,
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SN):
        x_SK, w_G, ends_G, bias_GN, bias_scale_S = ctx.saved_tensors
        implementation, layout, zero_tail, fuse, splits = ctx.settings
        needs_x, needs_w, _, needs_bias, needs_scale = ctx.needs_input_grad[:5]
        grad_x_SK = grad_w_G = grad_bias_GN = grad_scale_S = None
        if needs_x:
            grad_x_SK = implementation.dgrad(grad_SN, w_G, ends_G, layout=layout, zero_tail=zero_tail, splits=splits)
        if needs_w and fuse:
            implementation.wgrad(
                x_SK, grad_SN, ends_G, layout=layout, out=w_G.main_grad, accumulate=True, splits=splits
            )
            w_G.grad_added_to_main_grad = True
            grad_w_G = torch.empty_like(w_G)
        elif needs_w:
            grad_w_G = implementation.wgrad(x_SK, grad_SN, ends_G, layout=layout, splits=splits)
        if needs_bias or needs_scale:
            grad_bias_GN, grad_scale_S = implementation.bias_grad(grad_SN, ends_G, bias_GN, bias_scale_S, splits=splits)
        return grad_x_SK, grad_w_G, None, grad_bias_GN, grad_scale_S, None, None, None, None, None


def _check(x_SK, w_G, ends_G, bias_GN, bias_scale_S, layout) -> None:
    if layout not in ("nk", "kn"):
        raise ValueError(f"layout is nk or kn, not {layout!r}")
    if x_SK.dim() != 2 or w_G.dim() != 3 or ends_G.shape != w_G.shape[:1] or ends_G.dtype != torch.int32:
        raise ValueError(
            f"grouped_gemm needs x [S, K], w [G, ., .] and int32 ends [G], not {list(x_SK.shape)}, {list(w_G.shape)} "
            f"and {ends_G.dtype} {list(ends_G.shape)}"
        )
    k, n = (w_G.shape[2], w_G.shape[1]) if layout == "nk" else (w_G.shape[1], w_G.shape[2])
    if x_SK.shape[1] != k or x_SK.dtype != w_G.dtype:
        raise ValueError(f"x [S, {x_SK.shape[1]}] {x_SK.dtype} does not fit w with K = {k} {w_G.dtype}")
    if bias_GN is not None and bias_GN.shape != (w_G.shape[0], n):
        raise ValueError(f"bias needs shape [{w_G.shape[0]}, {n}], not {list(bias_GN.shape)}")
    if bias_scale_S is not None and (bias_GN is None or bias_scale_S.shape != x_SK.shape[:1]):
        raise ValueError("bias_scale needs a bias and shape [S]")

"""Grouped GEMM's operators and their gradients: `torch.ops.maniple.grouped_gemm`, `…_swiglu`, `…_dgrad`, `…_wgrad`, ….

Each operator chooses the implementation for its own operands (`registry.py`). A gradient is the same code in plain
eager mode, where it calls the functions below, and under whatever looks at operators (`custom_ops.named`), where it
calls them by their names.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

from maniple.kernels import custom_ops, main_grad, registry
from maniple.kernels.swiglu import backward as swiglu_backward
from maniple.kernels.swiglu import swiglu


def forward(
    x_SK,
    w_G,
    ends_G,
    bias_GN,
    bias_scale_S,
    source_S,
    slots_TK,
    main_grad_G,
    layout,
    zero_tail,
    recipe,
    kernels,
    splits,
) -> torch.Tensor:
    """`maniple::grouped_gemm`: `[S, N]`. `slots_TK` and `main_grad_G` are for the gradient alone."""
    operands = x_SK, w_G, layout, source_S is not None
    return registry.use("grouped_gemm", recipe, x_SK.device.type, kernels, operands).forward(
        x_SK,
        w_G,
        ends_G,
        bias_GN=bias_GN,
        bias_scale_S=bias_scale_S,
        source_S=source_S,
        layout=layout,
        zero_tail=zero_tail,
        splits=splits,
    )


def forward_swiglu(
    x_SK,
    w_G,
    ends_G,
    bias_G2F,
    probs_S,
    source_S,
    slots_TK,
    main_grad_G,
    alpha,
    limit,
    up_offset,
    gate_up,
    layout,
    keep,
    zero_tail,
    recipe,
    kernels,
    splits,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`maniple::grouped_gemm_swiglu`: act `[S, F]` and gate_up `[S, 2F]` (`[0, 2F]` unless `keep`)."""
    operands = x_SK, w_G, layout, source_S is not None, gate_up
    return registry.use("grouped_gemm_swiglu", recipe, x_SK.device.type, kernels, operands).forward_swiglu(
        x_SK,
        w_G,
        ends_G,
        bias_G2F=bias_G2F,
        probs_S=probs_S,
        source_S=source_S,
        alpha=alpha,
        limit=limit,
        up_offset=up_offset,
        gate_up=gate_up,
        layout=layout,
        keep=keep,
        zero_tail=zero_tail,
        splits=splits,
    )


def dgrad(grad_SN, w_G, ends_G, layout, zero_tail, recipe, kernels, splits) -> torch.Tensor:
    """`maniple::grouped_gemm_dgrad`: gradient of the rows that were multiplied, `[S, K]`."""
    operands = None, w_G, "kn" if layout == "nk" else "nk", False, "stacked", grad_SN.shape[1]
    implementation = registry.use("grouped_gemm", recipe, grad_SN.device.type, kernels, operands)
    return implementation.dgrad(grad_SN, w_G, ends_G, layout=layout, zero_tail=zero_tail, splits=splits)


def gather_sum(rows_SD, slots_TK, ends_G, recipe, kernels) -> torch.Tensor:
    """`maniple::grouped_gemm_gather_sum`: gradient of gathered rows, `[T, D]`."""
    return registry.use("grouped_gemm", recipe, rows_SD.device.type, kernels).gather_sum(rows_SD, slots_TK, ends_G)


def wgrad(x_SK, grad_SN, ends_G, source_S, layout, recipe, kernels, splits) -> torch.Tensor:
    """`maniple::grouped_gemm_wgrad`: gradient of the weights in their layout and x's dtype."""
    implementation = _wgrad_of(x_SK, grad_SN, source_S, layout, recipe, kernels)
    return implementation.wgrad(x_SK, grad_SN, ends_G, source_S=source_S, layout=layout, splits=splits)


def wgrad_into(x_SK, grad_SN, ends_G, source_S, out_G, accumulate, layout, recipe, kernels, splits) -> None:
    """`maniple::grouped_gemm_wgrad_into`: writes the gradient of the weights to `out_G`, or adds it there, once."""
    implementation = _wgrad_of(x_SK, grad_SN, source_S, layout, recipe, kernels)
    implementation.wgrad(
        x_SK, grad_SN, ends_G, source_S=source_S, layout=layout, out=out_G, accumulate=accumulate, splits=splits
    )


def bias_grad(grad_SN, ends_G, bias_GN, bias_scale_S, recipe, kernels, splits) -> tuple[torch.Tensor, torch.Tensor]:
    """`maniple::grouped_gemm_bias_grad`: gradients of the bias `[G, N]` and of its scale `[S]` (`[0]` without one)."""
    implementation = registry.use("grouped_gemm", recipe, grad_SN.device.type, kernels)
    grad_bias_GN, grad_scale_S = implementation.bias_grad(grad_SN, ends_G, bias_GN, bias_scale_S, splits=splits)
    return grad_bias_GN, grad_SN.new_empty(0) if grad_scale_S is None else grad_scale_S


def _wgrad_of(x_SK, grad_SN, source_S, layout, recipe, kernels) -> Any:
    operands = x_SK, None, layout, source_S is not None, "stacked", grad_SN.shape[1]
    return registry.use("grouped_gemm", recipe, x_SK.device.type, kernels, operands)


# what a pin of grouped_gemm_swiglu means for its gradient: the product's kernels, SwiGLU's
_PARTS = {"hopper": ("hopper", "triton"), "hopper_fused": ("hopper", "triton")}
_DIRECT = SimpleNamespace(
    dgrad=dgrad,
    gather_sum=gather_sum,
    wgrad=wgrad,
    wgrad_into=wgrad_into,
    bias_grad=bias_grad,
    swiglu_backward=swiglu_backward,
)


def _save(ctx, inputs, output) -> None:
    x_SK, w_G, ends_G, bias_GN, bias_scale_S, source_S, slots_TK, main_grad_G, *settings = inputs
    ctx.save_for_backward(x_SK, w_G, ends_G, bias_GN, bias_scale_S, source_S, slots_TK)
    # kept by itself: other passes add to it before this one's backward, and what is saved must not change
    ctx.settings, ctx.main_grad_G, ctx.main = settings, main_grad_G, None if main_grad_G is None else w_G


def _gradients(ctx, grad_SN, call) -> tuple:
    x_SK, w_G, ends_G, bias_GN, bias_scale_S, source_S, slots_TK = ctx.saved_tensors
    layout, zero_tail, *how = ctx.settings
    needs_x, needs_w, _, needs_bias, needs_scale = ctx.needs_input_grad[:5]
    rows = [x_SK]
    del x_SK
    grad_x_TK, grad_w_G = _product_gradients(
        ctx, call, needs_x, needs_w, grad_SN, rows, w_G, ends_G, source_S, slots_TK, layout, zero_tail, *how
    )
    grad_bias_GN = grad_scale_S = None
    if needs_bias or needs_scale:
        grad_bias_GN, grad_scale_S = call.bias_grad(grad_SN, ends_G, bias_GN, bias_scale_S, *how)
    return grad_x_TK, grad_w_G, None, grad_bias_GN, grad_scale_S if needs_scale else None, *[None] * 8


def _save_swiglu(ctx, inputs, output) -> None:
    x_SK, w_G, ends_G, bias_G2F, probs_S, source_S, slots_TK, main_grad_G, *settings = inputs
    ctx.save_for_backward(x_SK, w_G, ends_G, bias_G2F, probs_S, source_S, slots_TK, output[1])
    ctx.settings, ctx.main_grad_G, ctx.main = settings, main_grad_G, None if main_grad_G is None else w_G
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _swiglu_gradients(ctx, grad_SF, call) -> tuple:
    if grad_SF is None:
        return (None,) * 18
    x_SK, w_G, ends_G, bias_G2F, probs_S, source_S, slots_TK, x_S2F = ctx.saved_tensors
    alpha, limit, up_offset, gate_up, layout, _, zero_tail, recipe, kernels, splits = ctx.settings
    product_kernels, swiglu_kernels = _PARTS.get(kernels, (kernels, kernels))
    how = recipe, product_kernels, splits
    needs_x, needs_w, _, needs_bias, needs_probs = ctx.needs_input_grad[:5]
    grad_S2F, grad_probs_S = call.swiglu_backward(
        grad_SF, x_S2F, probs_S, ends_G, alpha, limit, up_offset, gate_up, swiglu_kernels
    )
    rows = [x_SK]
    del x_SK
    grad_x_TK, grad_w_G = _product_gradients(
        ctx, call, needs_x, needs_w, grad_S2F, rows, w_G, ends_G, source_S, slots_TK, layout, zero_tail, *how
    )
    grad_bias_G2F = call.bias_grad(grad_S2F, ends_G, bias_G2F, None, *how)[0] if needs_bias else None
    return grad_x_TK, grad_w_G, None, grad_bias_G2F, grad_probs_S if needs_probs else None, *[None] * 13


def activation_again(act_SF: torch.Tensor) -> Callable[[], torch.Tensor] | None:
    """Computes the result of `grouped_gemm_swiglu`, or of `swiglu`, again from the gate and up that its gradient keeps:
    the same bits, as long as its own backward has not run. None where nothing is kept."""
    node = act_SF.grad_fn
    if node is None:
        return None

    def again() -> torch.Tensor:
        saved: Any = node.saved_tensors  # asked of the node, since hooks may have put them elsewhere
        alpha, limit, up_offset, gate_up, *others = node.settings
        if len(saved) == 3:
            (x_S2F, probs_S, ends_G), kernels = saved, others[-1]
        else:
            ends_G, probs_S, x_S2F = saved[2], saved[4], saved[7]
            kernels = _PARTS.get(others[-2], (others[-2],) * 2)[1]
        form: Any = dict(alpha=alpha, limit=limit, up_offset=up_offset, layout=gate_up, kernels=kernels)
        return swiglu(x_S2F, probs_S, ends_G=ends_G, **form)

    return again


def _product_gradients(
    ctx,
    call,
    needs_x,
    needs_w,
    grad_SN,
    rows,
    w_G,
    ends_G,
    source_S,
    slots_TK,
    layout,
    zero_tail,
    recipe,
    kernels,
    splits,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of x and of w, each if it is needed. With a `main_grad_G` w's goes there: see `main_grad.added`.

    rows: a list of x_SK alone, which is taken out of it: w's gradient comes first, and where x was computed again for
    it, that memory is free when x's own gradient is made.
    """
    grad_x_TK = grad_w_G = None
    x_SK = rows.pop()
    if needs_w and ctx.main is not None:
        adds = main_grad.adds(ctx.main)
        call.wgrad_into(x_SK, grad_SN, ends_G, source_S, ctx.main_grad_G, adds, layout, recipe, kernels, splits)
        grad_w_G = main_grad.added(ctx.main)  # the weight itself: hooks of saved tensors may have replaced `w_G`
    elif needs_w:
        grad_w_G = call.wgrad(x_SK, grad_SN, ends_G, source_S, layout, recipe, kernels, splits)
    del x_SK
    if needs_x:
        grad_x_TK = call.dgrad(grad_SN, w_G, ends_G, layout, zero_tail, recipe, kernels, splits)
        if source_S is not None:
            grad_x_TK = call.gather_sum(grad_x_TK, slots_TK, ends_G, recipe, kernels)
    return grad_x_TK, grad_w_G


class GroupedGemm(torch.autograd.Function):
    """`maniple::grouped_gemm` and its gradient without the dispatcher."""

    @staticmethod
    def forward(ctx, *inputs):
        _save(ctx, inputs, None)
        return forward(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SN):
        return _gradients(ctx, grad_SN, _DIRECT)


class GroupedGemmSwiGLU(torch.autograd.Function):
    """`maniple::grouped_gemm_swiglu` and its gradient without the dispatcher."""

    @staticmethod
    def forward(ctx, *inputs):
        output = forward_swiglu(*inputs)
        _save_swiglu(ctx, inputs, output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SF, _):
        return _swiglu_gradients(ctx, grad_SF, _DIRECT)


def _slots(x_SK: torch.Tensor, source_S: torch.Tensor | None) -> int | torch.SymInt:
    return (x_SK if source_S is None else source_S).shape[0]


def _fake_forward(x_SK, w_G, ends_G, bias_GN, bias_scale_S, source_S, slots_TK, main_grad_G, layout, *settings):
    return x_SK.new_empty(_slots(x_SK, source_S), w_G.shape[1 if layout == "nk" else 2])


def _fake_forward_swiglu(x_SK, w_G, ends_G, bias_G2F, probs_S, source_S, slots_TK, main_grad_G, *settings):
    _, _, _, _, layout, keep, *_ = settings
    slots, columns = _slots(x_SK, source_S), w_G.shape[1 if layout == "nk" else 2]
    return x_SK.new_empty(slots, columns // 2), x_SK.new_empty(slots if keep else 0, columns)


def _fake_wgrad(x_SK, grad_SN, ends_G, source_S, layout, *settings):
    k, n = x_SK.shape[1], grad_SN.shape[1]
    return x_SK.new_empty(ends_G.shape[0], *((n, k) if layout == "nk" else (k, n)))


def _fake_bias_grad(grad_SN, ends_G, bias_GN, bias_scale_S, *settings):
    grad_scale_S = grad_SN.new_empty(0) if bias_scale_S is None else torch.empty_like(bias_scale_S)
    return torch.empty_like(bias_GN, memory_format=torch.contiguous_format), grad_scale_S


_HOW = "str recipe, str? kernels, SymInt[]? splits"
_INPUTS = "Tensor x, Tensor w, Tensor ends, Tensor? bias, Tensor? {}, Tensor? source, Tensor? slots, Tensor? main_grad"
custom_ops.define(
    f"grouped_gemm({_INPUTS.format('bias_scale')}, str layout, bool zero_tail, {_HOW}) -> Tensor",
    forward,
    _fake_forward,
)
custom_ops.define(
    f"grouped_gemm_swiglu({_INPUTS.format('probs')}, float alpha, float? limit, float up_offset, str gate_up, "
    f"str layout, bool keep, bool zero_tail, {_HOW}) -> (Tensor, Tensor)",
    forward_swiglu,
    _fake_forward_swiglu,
)
custom_ops.define(
    f"grouped_gemm_dgrad(Tensor grad, Tensor w, Tensor ends, str layout, bool zero_tail, {_HOW}) -> Tensor",
    dgrad,
    lambda grad_SN, w_G, ends_G, layout, *settings: grad_SN.new_empty(
        grad_SN.shape[0], w_G.shape[2 if layout == "nk" else 1]
    ),
)
custom_ops.define(
    "grouped_gemm_gather_sum(Tensor rows, Tensor slots, Tensor ends, str recipe, str? kernels) -> Tensor",
    gather_sum,
    lambda rows_SD, slots_TK, *settings: rows_SD.new_empty(slots_TK.shape[0], rows_SD.shape[1]),
)
_WGRAD = "Tensor x, Tensor grad, Tensor ends, Tensor? source"
custom_ops.define(f"grouped_gemm_wgrad({_WGRAD}, str layout, {_HOW}) -> Tensor", wgrad, _fake_wgrad)
custom_ops.define(
    f"grouped_gemm_wgrad_into({_WGRAD}, Tensor(a!) out, bool accumulate, str layout, {_HOW}) -> ()",
    wgrad_into,
    lambda *inputs: None,
)
custom_ops.define(
    f"grouped_gemm_bias_grad(Tensor grad, Tensor ends, Tensor bias, Tensor? bias_scale, {_HOW}) -> (Tensor, Tensor)",
    bias_grad,
    _fake_bias_grad,
)
_NAMED = SimpleNamespace(
    dgrad=torch.ops.maniple.grouped_gemm_dgrad,
    gather_sum=torch.ops.maniple.grouped_gemm_gather_sum,
    wgrad=torch.ops.maniple.grouped_gemm_wgrad,
    wgrad_into=torch.ops.maniple.grouped_gemm_wgrad_into,
    bias_grad=torch.ops.maniple.grouped_gemm_bias_grad,
    swiglu_backward=torch.ops.maniple.swiglu_backward,
)
custom_ops.differentiate("grouped_gemm", lambda ctx, grad_SN: _gradients(ctx, grad_SN, _NAMED), _save)
custom_ops.differentiate(
    "grouped_gemm_swiglu", lambda ctx, grad_SF, _: _swiglu_gradients(ctx, grad_SF, _NAMED), _save_swiglu
)

"""Grouped GEMM in portable Triton: NVIDIA and AMD GPUs, any shape and strides, fp32 too.

A fixed number of programs walks over all tiles of all groups: where a group begins is read on the device from `ends`,
so that the host waits for nothing. On NVIDIA's bulk copy engine tiles come through descriptors where alignment allows
it; else, and where rows are gathered, through pointers, all of whose offsets are 64-bit. The last tile of a group is
stored through a mask, and the last rows of a contraction are loaded through one, so that no value of another group or
of the undefined tail enters.
The functions at the end have the interface of `reference.py`. Shapes: S rows, G groups, weights `[G, N, K]` ("nk") or
`[G, K, N]` ("kn").
"""

from __future__ import annotations

import threading

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from maniple.kernels.grouped_gemm import launch
from maniple.kernels.grouped_gemm.swiglu_kernels import swiglu_rows_kernel
from maniple.kernels.grouped_gemm.triton_kernels import (
    bias_grad_kernel,
    gather_sum_kernel,
    rows_kernel,
    scale_grad_kernel,
    wgrad_kernel,
    zero_tail_kernel,
)

_thread = threading.local()


def forward(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
    source_S: torch.Tensor | None = None,
    layout: str = "nk",
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """As the reference's. `splits` is not needed: sizes are read on the device."""
    tokens, k = x_SK.shape
    rows = tokens if source_S is None else source_S.shape[0]
    groups, n = w_G.shape[0], w_G.shape[1 if layout == "nk" else 2]
    out_SN = x_SK.new_empty(rows, n)
    if not (rows and n and groups):
        return out_SN
    target = target_of(x_SK)
    tile = launch.rows_tile(target, x_SK.element_size(), n)
    loaded = [w_G, out_SN] if source_S is not None else [w_G, out_SN, x_SK]
    descriptors = target != "amd" and all(no_descriptor("", t) is None for t in loaded)
    x_desc = w_desc = out_desc = None
    if descriptors:
        block = [tile.columns, tile.depth] if layout == "nk" else [tile.depth, tile.columns]
        x_desc = TensorDescriptor.from_tensor(x_SK, [tile.rows, tile.depth]) if source_S is None else None
        w_desc = TensorDescriptor.from_tensor(w_G, [1, *block])
        out_desc = TensorDescriptor.from_tensor(out_SN, [tile.rows, tile.columns])
    w_n, w_k = (1, 2) if layout == "nk" else (2, 1)
    rows_kernel[(programs(x_SK),)](
        x_SK,
        w_G,
        out_SN,
        ends_G,
        None if source_S is None else source_S.contiguous(),
        None if bias_GN is None else bias_GN.contiguous(),
        None if bias_scale_S is None else bias_scale_S.contiguous(),
        x_desc,
        w_desc,
        out_desc,
        tokens,
        n,
        k,
        *x_SK.stride(),
        w_G.stride(0),
        w_G.stride(w_n),
        w_G.stride(w_k),
        out_SN.stride(0),
        GROUPS=groups,
        NK=layout == "nk",
        DESCRIPTORS=descriptors,
        GATHER=source_S is not None,
        BIAS=bias_GN is not None,
        SCALE=bias_scale_S is not None,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BAND=tile.band,
        PRECISION="ieee",
        num_stages=tile.stages,
        num_warps=tile.warps,
    )
    if zero_tail:
        fill_tail(out_SN, ends_G)
    return out_SN


def forward_swiglu(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    bias_G2F: torch.Tensor | None = None,
    probs_S: torch.Tensor | None = None,
    source_S: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    gate_up: str = "stacked",
    layout: str = "nk",
    keep: bool = True,
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As the reference's, in one kernel."""
    tokens, k = x_SK.shape
    rows = tokens if source_S is None else source_S.shape[0]
    groups, f = w_G.shape[0], w_G.shape[1 if layout == "nk" else 2] // 2
    act_SF, gate_up_S2F = x_SK.new_empty(rows, f), x_SK.new_empty(rows if keep else 0, 2 * f)
    if not (rows and f and groups):
        return act_SF, gate_up_S2F
    target = target_of(x_SK)
    tile = launch.swiglu_tile(target, x_SK.element_size(), f, interleaved=gate_up == "interleaved")
    w_view = halves(w_G, f, gate_up, layout)
    loaded = [w_view] if source_S is not None else [w_view, x_SK]
    descriptors = target != "amd" and all(no_descriptor("", t) is None for t in loaded)
    x_desc = w_desc = None
    if descriptors:
        block = [1, 1, tile.columns, tile.depth] if layout == "nk" else [1, tile.depth, 1, tile.columns]
        x_desc = TensorDescriptor.from_tensor(x_SK, [tile.rows, tile.depth]) if source_S is None else None
        w_desc = TensorDescriptor.from_tensor(w_view, block)
    w_half, w_f, w_k = (1, 2, 3) if layout == "nk" else (2, 3, 1)
    swiglu_rows_kernel[(programs(x_SK),)](
        x_SK,
        w_G,
        act_SF,
        gate_up_S2F,
        ends_G,
        None if source_S is None else source_S.contiguous(),
        None if bias_G2F is None else bias_G2F.contiguous(),
        None if probs_S is None else probs_S.contiguous(),
        x_desc,
        w_desc,
        tokens,
        f,
        k,
        *x_SK.stride(),
        w_G.stride(0),
        w_view.stride(w_half),
        w_view.stride(w_f),
        w_view.stride(w_k),
        f if gate_up == "stacked" else 1,
        GROUPS=groups,
        NK=layout == "nk",
        DESCRIPTORS=descriptors,
        GATHER=source_S is not None,
        BIAS=bias_G2F is not None,
        PROBS=probs_S is not None,
        KEEP=keep,
        INTERLEAVED=gate_up == "interleaved",
        ALPHA=float(alpha),
        LIMIT=limit,
        UP_OFFSET=float(up_offset),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BAND=tile.band,
        PRECISION="ieee",
        num_stages=tile.stages,
        num_warps=tile.warps,
    )
    if zero_tail:
        fill_tail(act_SF, ends_G)
    return act_SF, gate_up_S2F


def dgrad(
    grad_SN: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    layout: str = "nk",
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """As the reference's."""
    return forward(grad_SN, w_G, ends_G, layout="kn" if layout == "nk" else "nk", zero_tail=zero_tail)


def gather_sum(rows_SD: torch.Tensor, slots_TK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """As the reference's."""
    tokens, d = slots_TK.shape[0], rows_SD.shape[1]
    out_TD = rows_SD.new_empty(tokens, d)
    if not rows_SD.numel():
        return out_TD.zero_()
    if not out_TD.numel():
        return out_TD
    block = launch.gather_block(target_of(rows_SD))
    gather_sum_kernel[(triton.cdiv(tokens, block.rows), triton.cdiv(d, block.columns))](
        rows_SD,
        slots_TK.contiguous(),
        out_TD,
        ends_G[-1:],
        tokens,
        rows_SD.shape[0],
        d,
        *rows_SD.stride(),
        COPIES=slots_TK.shape[1],
        ROWS=block.rows,
        COLUMNS=block.columns,
        num_warps=block.warps,
    )
    return out_TD


def wgrad(
    x_SK: torch.Tensor,
    grad_SN: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    source_S: torch.Tensor | None = None,
    layout: str = "nk",
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """As the reference's; `out` may have any strides."""
    a_SA, b_SB = (grad_SN, x_SK) if layout == "nk" else (x_SK, grad_SN)
    out = wgrad_result(a_SA, b_SB, len(ends_G), out, accumulate)
    if not out.numel():
        return out
    target = target_of(x_SK)
    tile = launch.wgrad_tile(target, x_SK.element_size(), b_SB.shape[1], fp32=out.dtype == torch.float32)
    gather_a, gather_b = source_S is not None and layout != "nk", source_S is not None and layout == "nk"
    loaded = [t for t, gathered in ((a_SA, gather_a), (b_SB, gather_b)) if not gathered]
    descriptors = target != "amd" and all(no_descriptor("", t) is None for t in loaded)
    a_desc = b_desc = None
    if descriptors:
        a_desc = None if gather_a else TensorDescriptor.from_tensor(a_SA, [tile.depth, tile.rows])
        b_desc = None if gather_b else TensorDescriptor.from_tensor(b_SB, [tile.depth, tile.columns])
    wgrad_kernel[(programs(x_SK),)](
        a_SA,
        b_SB,
        out,
        ends_G,
        None if source_S is None else source_S.contiguous(),
        a_desc,
        b_desc,
        x_SK.shape[0],
        a_SA.shape[1],
        b_SB.shape[1],
        *a_SA.stride(),
        *b_SB.stride(),
        *out.stride(),
        GROUPS=len(ends_G),
        DESCRIPTORS=descriptors,
        GATHER_A=gather_a,
        GATHER_B=gather_b,
        ACCUMULATE=accumulate,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        BAND=tile.band,
        PRECISION="ieee",
        num_stages=tile.stages,
        num_warps=tile.warps,
    )
    return out


def bias_grad(
    grad_SN: torch.Tensor,
    ends_G: torch.Tensor,
    bias_GN: torch.Tensor,
    bias_scale_S: torch.Tensor | None,
    *,
    splits: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As the reference's."""
    (rows, n), groups = grad_SN.shape, len(ends_G)
    columns, block = (16, 16) if target_of(grad_SN) == "interpreter" else (64, 64)
    grad_bias_GN = torch.empty_like(bias_GN, memory_format=torch.contiguous_format)
    if grad_bias_GN.numel():
        bias_grad_kernel[(groups, triton.cdiv(n, columns))](
            grad_SN,
            bias_scale_S,
            grad_bias_GN,
            ends_G,
            n,
            *grad_SN.stride(),
            SCALE=bias_scale_S is not None,
            ROWS=block,
            COLUMNS=columns,
        )
    if bias_scale_S is None:
        return grad_bias_GN, None
    grad_scale_S = torch.empty_like(bias_scale_S, memory_format=torch.contiguous_format)
    if rows:
        scale_grad_kernel[(triton.cdiv(rows, block),)](
            grad_SN,
            bias_GN.contiguous(),
            grad_scale_S,
            ends_G,
            rows,
            n,
            *grad_SN.stride(),
            GROUPS=groups,
            ROWS=block,
            COLUMNS=columns,
        )
    return grad_bias_GN, grad_scale_S


def wgrad_result(
    a_SA: torch.Tensor, b_SB: torch.Tensor, groups: int, out: torch.Tensor | None, accumulate: bool
) -> torch.Tensor:
    """`out`, or a new tensor for the weight gradients. Raises ValueError where it does not fit."""
    if accumulate and out is None:
        raise ValueError("wgrad accumulates into out: pass it")
    shape = (groups, a_SA.shape[1], b_SB.shape[1])
    if out is None:
        return a_SA.new_empty(shape)
    if out.shape != shape:
        raise ValueError(f"wgrad needs out of shape {list(shape)}, not {list(out.shape)}")
    return out


def halves(w_G: torch.Tensor, f: int, gate_up: str, layout: str) -> torch.Tensor:
    """Gate and up of fc1's weights as an axis of their own: `[G, 2, F, K]` ("nk") or `[G, K, 2, F]`, a view."""
    axis = 1 if layout == "nk" else 2
    return (
        w_G.unflatten(axis, (2, f)) if gate_up == "stacked" else w_G.unflatten(axis, (f, 2)).transpose(axis, axis + 1)
    )


def fill_tail(out_SN: torch.Tensor, ends_G: torch.Tensor) -> None:
    """Zeroes the rows past the last group of a result whose columns are contiguous."""
    rows, n = out_SN.shape
    block, columns = (16, 16) if target_of(out_SN) == "interpreter" else (16, 256)
    zero_tail_kernel[(triton.cdiv(rows, block),)](
        out_SN, ends_G[-1:], rows, n, out_SN.stride(0), ROWS=block, COLUMNS=columns
    )


def no_descriptor(name: str, tensor: torch.Tensor) -> str | None:
    """Why this tensor cannot be loaded through a descriptor; None if it can."""
    return launch.no_descriptor(name, tensor.shape, tensor.stride(), tensor.element_size(), tensor.data_ptr())


def target_of(tensor: torch.Tensor) -> str:
    """What `launch` calls the device of a tensor; Triton's interpreter runs on the CPU."""
    if tensor.device.type == "cpu":
        return "interpreter"
    return "amd" if torch.version.hip else "nvidia"


def programs(tensor: torch.Tensor) -> int:
    """Programs to start: one a multiprocessor; a few under the interpreter."""
    if tensor.device.type == "cpu":
        return 3
    _bind_context()
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count


def _bind_context() -> None:
    """Gives this thread the GPU's context, once: the driver makes descriptors in it, and a thread of backward whose
    first call is one of these kernels has none yet (Triton's launch looks for it only after it has made them)."""
    if not getattr(_thread, "bound", False):
        torch.cuda.mem_get_info()  # the runtime binds it to the thread at any call, and this one may stand in a capture
        _thread.bound = True

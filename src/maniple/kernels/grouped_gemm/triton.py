"""Grouped GEMM in portable Triton: NVIDIA and AMD GPUs, any shape and strides, fp32 too.

A fixed number of programs walks over all tiles of all groups: where a group begins is read on the device from `ends`,
so that the host waits for nothing. On NVIDIA's bulk copy engine tiles come through descriptors where alignment allows
it; else through pointers, all of whose offsets are 64-bit. The last tile of a group is stored through a mask, and the
last rows of a contraction are loaded through one, so that no value of another group or of the undefined tail enters.
The functions at the end have the interface of `reference.py`. Shapes: S rows, G groups, weights `[G, N, K]` ("nk") or
`[G, K, N]` ("kn").
"""

from __future__ import annotations

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from maniple.kernels.grouped_gemm import launch
from maniple.kernels.grouped_gemm.triton_kernels import (
    bias_grad_kernel,
    rows_kernel,
    scale_grad_kernel,
    wgrad_kernel,
    zero_tail_kernel,
)


def forward(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
    layout: str = "nk",
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """As the reference's. `splits` is not needed: sizes are read on the device."""
    rows, k = x_SK.shape
    groups, n = w_G.shape[0], w_G.shape[1 if layout == "nk" else 2]
    out_SN = x_SK.new_empty(rows, n)
    if not (rows and n and groups):
        return out_SN
    target = target_of(x_SK)
    tile = launch.rows_tile(target, x_SK.element_size(), n)
    descriptors = target != "amd" and all(
        no_descriptor(name, t) is None for name, t in (("x", x_SK), ("w", w_G), ("out", out_SN))
    )
    x_desc = w_desc = out_desc = None
    if descriptors:
        block = [tile.columns, tile.depth] if layout == "nk" else [tile.depth, tile.columns]
        x_desc = TensorDescriptor.from_tensor(x_SK, [tile.rows, tile.depth])
        w_desc = TensorDescriptor.from_tensor(w_G, [1, *block])
        out_desc = TensorDescriptor.from_tensor(out_SN, [tile.rows, tile.columns])
    w_n, w_k = (1, 2) if layout == "nk" else (2, 1)
    rows_kernel[(programs(x_SK),)](
        x_SK,
        w_G,
        out_SN,
        ends_G,
        None if bias_GN is None else bias_GN.contiguous(),
        None if bias_scale_S is None else bias_scale_S.contiguous(),
        x_desc,
        w_desc,
        out_desc,
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


def wgrad(
    x_SK: torch.Tensor,
    grad_SN: torch.Tensor,
    ends_G: torch.Tensor,
    *,
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
    tile = launch.wgrad_tile(target, x_SK.element_size(), b_SB.shape[1], accumulates=accumulate)
    descriptors = target != "amd" and all(no_descriptor(name, t) is None for name, t in (("a", a_SA), ("b", b_SB)))
    a_desc = b_desc = None
    if descriptors:
        a_desc = TensorDescriptor.from_tensor(a_SA, [tile.depth, tile.rows])
        b_desc = TensorDescriptor.from_tensor(b_SB, [tile.depth, tile.columns])
    wgrad_kernel[(programs(x_SK),)](
        a_SA,
        b_SB,
        out,
        ends_G,
        a_desc,
        b_desc,
        a_SA.shape[1],
        b_SB.shape[1],
        *a_SA.stride(),
        *b_SB.stride(),
        *out.stride(),
        GROUPS=len(ends_G),
        DESCRIPTORS=descriptors,
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
    return torch.cuda.get_device_properties(tensor.device).multi_processor_count

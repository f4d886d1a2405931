"""Grouped GEMM for Hopper in Gluon: bf16, warp-specialised, everything through the bulk copy engine.

A program is three roles. One warp loads: it runs ahead through the tiles and fills a ring of stages in shared memory.
Two warpgroups compute, each a half of the tile's rows, and store their half through shared memory while the loader
already fetches the next tile: that overlap is what plain Triton leaves on the table for short contractions. Roles walk
the groups on their own, each reading `ends` on the device. A stage goes round by two barriers: `full` counts the bytes
that have come, `empty` the warpgroups that are done with it.

Where a group's weights are much of the L2 cache, loaders keep pace with each other (`Tile.pace`): left alone, programs
drift apart until what one has read is gone before its neighbour asks for it.

A group's last tile of rows is stored through a mask. In a weight gradient the last rows of a group are followed in
shared memory by those of the next group (or by the undefined tail): the warpgroups overwrite them with zeros before
they multiply. What is added to a gradient in fp32 is added in the L2 cache (`hopper_fp32.py`).

The functions at the end have the interface of `reference.py`; what this file cannot run, `refusal` says.
"""

from __future__ import annotations

from functools import cache

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from maniple.kernels.grouped_gemm import launch
from maniple.kernels.grouped_gemm import triton as portable
from maniple.kernels.grouped_gemm.hopper_kernels import rows_kernel
from maniple.kernels.grouped_gemm.hopper_wgrad_kernels import wgrad_kernel
from maniple.kernels.grouped_gemm.launch import Tile
from maniple.kernels.swiglu import triton as swiglu

bias_grad = portable.bias_grad
gather_sum = portable.gather_sum
_LOADER_REGISTERS, _CONSUMER_REGISTERS = 40, 232  # of 504 that one warp of each role may share
_ELEMENTS = {
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.bfloat16: gl.bfloat16,
    torch.float32: gl.float32,
}


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
    """As the reference's. Raises ValueError for operands that `refusal` names."""
    _gathers_nothing(source_S)
    rows, k = x_SK.shape
    groups, n = w_G.shape[0], w_G.shape[1 if layout == "nk" else 2]
    out_SN = x_SK.new_empty(rows, n)
    _check({"x": x_SK, "w": w_G, "the result": out_SN})
    tile = launch.hopper_tile(n, k, layout)
    block = [1, tile.columns, tile.depth] if layout == "nk" else [1, tile.depth, tile.columns]
    rows_kernel[(portable.programs(x_SK),)](
        pace_counter(tile, x_SK.device),
        descriptor(x_SK, [tile.rows // 2, tile.depth]),
        descriptor(w_G, block),
        descriptor(out_SN, [tile.rows // 2, tile.columns // tile.parts]),
        out_SN,
        ends_G,
        None if bias_GN is None else bias_GN.contiguous(),
        None if bias_scale_S is None else bias_scale_S.contiguous(),
        n,
        k,
        out_SN.stride(0),
        GROUPS=groups,
        NK=layout == "nk",
        BIAS=bias_GN is not None,
        SCALE=bias_scale_S is not None,
        PARTS=tile.parts,
        PACE=tile.pace,
        **constants(tile),
    )
    if zero_tail:
        portable.fill_tail(out_SN, ends_G)
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
    """As the reference's: this file's product, then the portable SwiGLU kernel."""
    x_S2F = forward(x_SK, w_G, ends_G, bias_GN=bias_G2F, source_S=source_S, layout=layout)
    act_SF = swiglu.forward(x_S2F, probs_S, ends_G, alpha=alpha, limit=limit, up_offset=up_offset, layout=gate_up)
    if zero_tail:
        portable.fill_tail(act_SF, ends_G)
    return act_SF, x_S2F if keep else x_S2F[:0]


def dgrad(
    grad_SN: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    layout: str = "nk",
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """As the reference's; a gradient with strides that the copy engine does not take is copied first."""
    return forward(_loadable(grad_SN), w_G, ends_G, layout="kn" if layout == "nk" else "nk", zero_tail=zero_tail)


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
    """As the reference's. An `out` that `writes` cannot serve is the portable kernel's."""
    _gathers_nothing(source_S)
    if out is not None and not writes(out, accumulate):
        return portable.wgrad(x_SK, grad_SN, ends_G, layout=layout, out=out, accumulate=accumulate)
    grad_SN = _loadable(grad_SN)
    a_SA, b_SB = (grad_SN, x_SK) if layout == "nk" else (x_SK, grad_SN)
    out = portable.wgrad_result(a_SA, b_SB, len(ends_G), out, accumulate)
    _check({"x": x_SK, "the result's gradient": grad_SN})
    fp32 = out.dtype == torch.float32
    tile = launch.wgrad_tile("hopper", 2, b_SB.shape[1], fp32=fp32)
    wgrad_kernel[(portable.programs(x_SK),)](
        descriptor(a_SA, [tile.depth, tile.rows // 2]),
        descriptor(b_SB, [tile.depth, tile.columns]),
        descriptor(out, [1, tile.rows // 2, 64 if fp32 else tile.columns]),
        ends_G,
        a_SA.shape[1],
        b_SB.shape[1],
        GROUPS=len(ends_G),
        ACCUMULATE=accumulate,
        BUFFERS=tile.buffers,
        **constants(tile),
    )
    return out


def writes(out: torch.Tensor, accumulate: bool) -> bool:
    """Whether a weight gradient can be written to this tensor, or added to it, through the copy engine."""
    fits = out.is_contiguous() and portable.no_descriptor("the result", out) is None
    return fits and (out.dtype == torch.float32 or (out.dtype == torch.bfloat16 and not accumulate))


def refusal(
    x_SK: torch.Tensor | None,
    w_G: torch.Tensor | None,
    layout: str,
    gathers: bool = False,
    gate_up: str = "stacked",
    grad_columns: int = 8,
) -> str | None:
    """Why rows times weights, or a weight gradient, cannot run here; None if it can.

    None for x: a gradient that is copied where it must be; None for w: a weight gradient. gate_up may be either.
    grad_columns: of the result's gradient, where that is an operand.
    """
    if gathers:
        return "gathers no rows"
    if grad_columns % 8:
        return f"needs gradients of a multiple of 8 columns, and they have {grad_columns}"
    for name, tensor in (("x", x_SK), ("w", w_G)):
        if tensor is None:
            continue
        if tensor.dtype != torch.bfloat16:
            return f"computes bf16, not {str(tensor.dtype).removeprefix('torch.')}"
        if (reason := portable.no_descriptor(name, tensor)) is not None:
            return reason
    n = 8 if w_G is None else w_G.shape[1 if layout == "nk" else 2]
    return f"needs N a multiple of 8, and it is {n}" if n % 8 else None


def _gathers_nothing(source_S: torch.Tensor | None) -> None:
    if source_S is not None:
        raise ValueError("Hopper's grouped GEMM gathers no rows: pass them in order")


def _loadable(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if portable.no_descriptor("", tensor) is None else tensor.contiguous()


def _check(operands: dict[str, torch.Tensor]) -> None:
    for name, tensor in operands.items():
        if tensor.dtype != torch.bfloat16:
            raise ValueError(f"{name} is {tensor.dtype}, and Hopper's grouped GEMM computes bf16")
        if (reason := portable.no_descriptor(name, tensor)) is not None:
            raise ValueError(reason)


def descriptor(tensor: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """What the copy engine loads and stores this tensor by, in blocks, swizzled as the matrix instructions want it."""
    return TensorDescriptor.from_tensor(tensor, block, _swizzled(tuple(block), tensor.dtype))


@cache  # the compiler takes far longer to choose one than a launch takes otherwise
def _swizzled(block: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(block), _ELEMENTS[dtype])


def pace_counter(tile: Tile, device: torch.device) -> torch.Tensor | None:
    """What loaders count their steps at, where they keep pace."""
    return torch.zeros(1, dtype=torch.int32, device=device) if tile.pace else None


def constants(tile: Tile) -> dict[str, int]:
    """A tile as the kernels' constants."""
    return {
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "STAGES": tile.stages,
        "BAND": tile.band,
        "LOADER": _LOADER_REGISTERS,
        "CONSUMER": _CONSUMER_REGISTERS,
        "num_warps": tile.warps,
    }

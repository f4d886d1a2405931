"""Grouped GEMM with SwiGLU as its epilogue, for Hopper in Gluon: gate and up stacked, rows in order.

`hopper_swiglu_kernels.py` says how it works. On an H200 it is the faster way at DeepSeek-V3's shape, and no faster at
Qwen3-30B's than `hopper.py`'s product and then the SwiGLU kernel: it is selected where the contraction is deep.
"""

from __future__ import annotations

import torch

from maniple.kernels.grouped_gemm import hopper, launch
from maniple.kernels.grouped_gemm import triton as portable
from maniple.kernels.grouped_gemm.hopper_swiglu_kernels import swiglu_rows_kernel


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
    """As the reference's. Raises ValueError for operands that `refusal` names."""
    if (reason := refusal(x_SK, w_G, layout, source_S is not None, gate_up)) is not None:
        raise ValueError(f"Hopper's fused SwiGLU {reason}")
    rows, k = x_SK.shape
    groups, f = w_G.shape[0], w_G.shape[1 if layout == "nk" else 2] // 2
    act_SF, gate_up_S2F = x_SK.new_empty(rows, f), x_SK.new_empty(rows if keep else 0, 2 * f)
    tile = launch.hopper_swiglu_tile(f)
    block = [1, 1, tile.columns, tile.depth] if layout == "nk" else [1, tile.depth, 1, tile.columns]
    half = [tile.rows // 2, tile.columns]
    kept = (gate_up_S2F[:, :f], gate_up_S2F[:, f:]) if keep else (act_SF, act_SF)  # stand-ins that nothing reads
    swiglu_rows_kernel[(portable.programs(x_SK),)](
        hopper.pace_counter(tile, x_SK.device),
        hopper.descriptor(x_SK, [tile.rows // 2, tile.depth]),
        hopper.descriptor(portable.halves(w_G, f, gate_up, layout), block),
        hopper.descriptor(act_SF, half),
        hopper.descriptor(kept[0], half),
        hopper.descriptor(kept[1], half),
        act_SF,
        gate_up_S2F,
        ends_G,
        None if bias_G2F is None else bias_G2F.contiguous(),
        None if probs_S is None else probs_S.contiguous(),
        f,
        k,
        GROUPS=groups,
        NK=layout == "nk",
        BIAS=bias_G2F is not None,
        PROBS=probs_S is not None,
        KEEP=keep,
        ALPHA=float(alpha),
        LIMIT=limit,
        UP_OFFSET=float(up_offset),
        PACE=tile.pace,
        **hopper.constants(tile),
    )
    if zero_tail:
        portable.fill_tail(act_SF, ends_G)
    return act_SF, gate_up_S2F


def refusal(
    x_SK: torch.Tensor, w_G: torch.Tensor, layout: str, gathers: bool = False, gate_up: str = "stacked"
) -> str | None:
    """Why these operands cannot run here; None if they can."""
    if gate_up != "stacked":
        return "takes gate and up stacked"
    n = w_G.shape[1 if layout == "nk" else 2]
    if n % 16:
        return f"needs F a multiple of 8, and 2F is {n}"
    return hopper.refusal(x_SK, w_G, layout, gathers)


def defers(x_SK: torch.Tensor, w_G: torch.Tensor, layout: str, *others) -> str | None:
    """Why other kernels should go first for these operands; None if they should not."""
    k = w_G.shape[2 if layout == "nk" else 1]
    return None if k >= launch.FUSED_SWIGLU_DEPTH else f"is no faster than two kernels where K is {k}"

"""Permutation in portable Triton: a counting sort on the device, and rows copied or summed.

The functions have the interface of `reference.py`. The host waits for nothing, and no atomic decides an order. Rows
past `ends_E[-1]` are neither read nor written. What looks at operators sees `maniple::sort_by_expert`,
`maniple::gather_rows` and `maniple::sum_rows`.
"""

from __future__ import annotations

import torch
import triton

from maniple.kernels import chips, custom_ops
from maniple.kernels.grouped_gemm.triton_kernels import gather_sum_kernel
from maniple.kernels.permute import launch
from maniple.kernels.permute.reference import Permutation
from maniple.kernels.permute.triton_kernels import (
    gather_kernel,
    place_kernel,
    rank_kernel,
    scan_kernel,
    starts_kernel,
)

_SUMMED = (torch.bfloat16, torch.float16, torch.float32)


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int) -> Permutation:
    """As the reference's."""
    call = torch.ops.maniple.sort_by_expert if custom_ops.named(ids_TK) else _sort
    return Permutation(*call(ids_TK, num_experts))


def gather(x_TD: torch.Tensor, permutation: Permutation, slots: int) -> torch.Tensor:
    """As the reference's, but for the rows past the last end, which are left unwritten."""
    call = torch.ops.maniple.gather_rows if custom_ops.named(x_TD) else _gather
    return call(x_TD, permutation.order_S, permutation.ends_E, permutation.position_TK.shape[1], slots)


def scatter_sum(rows_SD: torch.Tensor, permutation: Permutation) -> torch.Tensor:
    """As the reference's. Raises ValueError for other rows than bf16, fp16 and fp32: fp64 would be summed in fp32."""
    if rows_SD.dtype not in _SUMMED:
        raise ValueError(f"permute's triton sums bf16, fp16 or fp32, not {rows_SD.dtype}: use kernels='reference'")
    call = torch.ops.maniple.sum_rows if custom_ops.named(rows_SD) else _sum
    return call(rows_SD, permutation.position_TK, permutation.ends_E)


def _sort(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """order int64 `[T * K]`, position int64 `[T, K]`, ends int32 `[E]`."""
    ids_TK = ids_TK.contiguous()
    order_S, position_TK, ends_E = _empty_sort(ids_TK, num_experts)
    choices = ids_TK.numel()
    if not choices:
        return order_S, position_TK, ends_E.zero_()
    block, warps = launch.sort_block(chips.target(ids_TK), num_experts), launch.INDEX_WARPS
    chunks = triton.cdiv(choices, block.chunk)
    ranks_N = ends_E.new_empty(choices)
    tallies_CE = ends_E.new_zeros(chunks, num_experts + 1)
    totals_E, starts_E = ends_E.new_empty(num_experts + 1), ends_E.new_empty(num_experts + 1)
    rank_kernel[(chunks,)](
        ids_TK,
        ranks_N,
        tallies_CE,
        choices,
        num_experts,
        CHUNK=block.chunk,
        COLUMNS=block.columns,
        num_warps=warps,
    )
    scan_kernel[(triton.cdiv(num_experts + 1, block.experts),)](
        tallies_CE,
        totals_E,
        chunks,
        num_experts,
        CHUNKS=block.chunks,
        EXPERTS=block.experts,
        num_warps=warps,
    )
    starts_kernel[(1,)](totals_E, starts_E, ends_E, num_experts, WIDTH=launch.width(num_experts), num_warps=warps)
    place_kernel[(chunks,)](
        ids_TK,
        ranks_N,
        tallies_CE,
        starts_E,
        position_TK,
        order_S,
        choices,
        num_experts,
        CHUNK=block.chunk,
        num_warps=warps,
    )
    return order_S, position_TK, ends_E


def _gather(x_TD: torch.Tensor, order_S: torch.Tensor, ends_E: torch.Tensor, topk: int, slots: int) -> torch.Tensor:
    d = x_TD.shape[1]
    out_SD = x_TD.new_empty(slots, d)
    if not out_SD.numel():
        return out_SD
    block = launch.rows_block(chips.target(x_TD), d)
    gather_kernel[(triton.cdiv(slots, block.rows), triton.cdiv(d, block.columns))](
        x_TD,
        order_S,
        ends_E[-1:],
        out_SD,
        slots,
        d,
        *x_TD.stride(),
        TOPK=topk,
        ROWS=block.rows,
        COLUMNS=block.columns,
        num_warps=block.warps,
    )
    return out_SD


def _sum(rows_SD: torch.Tensor, position_TK: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    (tokens, topk), d = position_TK.shape, rows_SD.shape[1]
    out_TD = rows_SD.new_empty(tokens, d)
    if not rows_SD.numel():
        return out_TD.zero_()
    if not out_TD.numel():
        return out_TD
    block = launch.rows_block(chips.target(rows_SD), d)
    gather_sum_kernel[(triton.cdiv(tokens, block.rows), triton.cdiv(d, block.columns))](
        rows_SD,
        position_TK,
        out_TD,
        ends_E[-1:],
        tokens,
        rows_SD.shape[0],
        d,
        *rows_SD.stride(),
        COPIES=topk,
        ROWS=block.rows,
        COLUMNS=block.columns,
        num_warps=block.warps,
    )
    return out_TD


def _empty_sort(ids_TK: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        ids_TK.new_empty(ids_TK.numel(), dtype=torch.int64),
        ids_TK.new_empty(ids_TK.shape, dtype=torch.int64),
        ids_TK.new_empty(num_experts, dtype=torch.int32),
    )


custom_ops.define("sort_by_expert(Tensor ids, int num_experts) -> (Tensor, Tensor, Tensor)", _sort, _empty_sort)
custom_ops.define(
    "gather_rows(Tensor x, Tensor order, Tensor ends, int topk, int slots) -> Tensor",
    _gather,
    lambda x_TD, order_S, ends_E, topk, slots: x_TD.new_empty(slots, x_TD.shape[1]),
)
custom_ops.define(
    "sum_rows(Tensor rows, Tensor position, Tensor ends) -> Tensor",
    _sum,
    lambda rows_SD, position_TK, ends_E: rows_SD.new_empty(position_TK.shape[0], rows_SD.shape[1]),
)

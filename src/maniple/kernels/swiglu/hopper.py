"""SwiGLU and its gradient quantized on Hopper, in Gluon: what lies between is rounded to bf16 in registers.

A tile of 128 x 128 is copied to shared memory, computed there in place, and quantized as `quantize/hopper.py` does: to
the bits of `swiglu` and `quantize_rows` one after the other. The functions have the interface of
`quantized_reference.py`; what this file cannot run, `refusal` says.
"""

from __future__ import annotations

import torch

from maniple.kernels.quantize import launch
from maniple.kernels.quantize import reference as quantize_reference
from maniple.kernels.quantize.passed import How
from maniple.kernels.quantize.quantized import OCP, padded_size
from maniple.kernels.swiglu.hopper_kernels import backward_kernel, forward_kernel


def forward(
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor,
    ends_G: torch.Tensor,
    how: How,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference's, for operands that `refusal` does not name."""
    f, gate_up_S2F = gate_up_S2F.shape[1] // 2, _aligned(gate_up_S2F)
    made, places, constants = _results(gate_up_S2F, f, ends_G, how)
    slots, padded = gate_up_S2F.shape[0], padded_size(gate_up_S2F.shape[0], ends_G.shape[0])
    forward_kernel[(launch.rows_grid(padded, f),)](
        gate_up_S2F.view(torch.int32),
        probs_S.contiguous(),
        ends_G,
        *places,
        f,
        slots,
        padded,
        gate_up_S2F.stride(0) // 2,
        **constants,
        maxnreg=launch.HOPPER_SWIGLU_REGISTERS[0],
    )
    return made


def backward(
    grad_SF: torch.Tensor,
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor,
    ends_G: torch.Tensor,
    how: How,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As the reference's, for operands that `refusal` does not name."""
    slots, f = grad_SF.shape
    made, places, constants = _results(gate_up_S2F, 2 * f, ends_G, how)
    padded = padded_size(slots, ends_G.shape[0])
    parts_TS = probs_S.new_zeros(f // launch.COLUMNS, slots)  # of rows past the last group the sums stay zero
    grad_SF, gate_up_S2F = _aligned(grad_SF), _aligned(gate_up_S2F)
    backward_kernel[(launch.rows_grid(padded, f),)](
        grad_SF.view(torch.int32),
        gate_up_S2F.view(torch.int32),
        probs_S.contiguous(),
        parts_TS,
        ends_G,
        *places,
        f,
        slots,
        padded,
        grad_SF.stride(0) // 2,
        gate_up_S2F.stride(0) // 2,
        **constants,
        maxnreg=launch.HOPPER_SWIGLU_REGISTERS[1],
    )
    return *made, parts_TS.sum(0)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """x, copied unless its rows start at multiples of 16 bytes."""
    fits = x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    return x if fits else x.clone(memory_format=torch.contiguous_format)


def _results(like: torch.Tensor, columns: int, ends_G: torch.Tensor, how: How):
    """(what is returned, the same as the kernels take it, their constants)."""
    padded = padded_size(like.shape[0], ends_G.shape[0])
    shaped = like.new_empty(0, columns)
    empty = quantize_reference.empty_rows(
        shaped, like.shape[0], padded, how.recipe, how.dtype, how.rowwise, how.columnwise
    )
    data_S, scales_S, data_P, scales_P = empty
    padded_G = torch.empty_like(ends_G)
    places = (
        padded_G,
        data_S.view(torch.int16) if how.rowwise else None,
        scales_S if how.rowwise else None,
        data_P.view(torch.int32) if how.columnwise else None,
        scales_P if how.columnwise else None,
    )
    form = quantize_reference.format_of(how.dtype).name
    return (*empty, padded_G), places, launch.hopper_swiglu_constants(ends_G.shape[0], how.recipe, form, how.rounding)


def refusal(of: torch.dtype, slots: int, f: int, probs: torch.dtype, dtype: torch.dtype) -> str | None:
    """Why these kernels cannot serve gate_up `[S, 2F]` of a dtype; None if they can. dtype: what it is quantized to."""
    if of != torch.bfloat16 or probs != torch.float32 or dtype not in OCP:
        return f"takes bf16 and fp32 routing weights to OCP's float8, not {of}, {probs} to {dtype}"
    if not slots or not f or f % launch.COLUMNS:
        return f"needs some rows, and an expert size that {launch.COLUMNS} divides, not {f}"
    return None

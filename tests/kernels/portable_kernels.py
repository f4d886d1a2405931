"""The portable Triton kernels of grouped GEMM and SwiGLU as they are compiled for a target: names, tiles, arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.kernels.compiling import Descriptor, compile_for

from maniple.kernels.grouped_gemm import launch
from maniple.kernels.grouped_gemm import swiglu_kernels as fused
from maniple.kernels.grouped_gemm import triton_kernels as plain
from maniple.kernels.swiglu import launch as swiglu_launch
from maniple.kernels.swiglu import triton_kernels as swiglu

GPT_OSS: dict[str, Any] = {"ALPHA": 1.702, "LIMIT": 7.0, "UP_OFFSET": 1.0}


@dataclass(frozen=True)
class Case:
    """A kernel as `triton.py` launches it on a target."""

    target: str
    kernel: Any
    arguments: dict[str, Any]
    tile: launch.Tile | swiglu_launch.Block

    def compile(self):
        stages = self.tile.stages if isinstance(self.tile, launch.Tile) else 3
        return compile_for(self.target, self.kernel, self.arguments, num_warps=self.tile.warps, num_stages=stages)


def kind(target: str) -> str:
    """The target as `launch` calls it."""
    return "amd" if target.startswith("gfx") else "nvidia"


def constants(tile: launch.Tile) -> dict[str, tuple]:
    return {name: ("=", getattr(tile, name.lower())) for name in ("ROWS", "COLUMNS", "DEPTH", "BAND")}


def _fixed(**values: Any) -> dict[str, tuple]:
    return {name: ("=", value) for name, value in values.items()}


def rows(target: str, *, nk: bool = True, bias: bool = False, gather: bool = False) -> Case:
    """Rows times weights."""
    tile = launch.rows_tile(kind(target), 2, 4096)
    descriptors = target.startswith("sm_")
    block = (1, tile.columns, tile.depth) if nk else (1, tile.depth, tile.columns)
    arguments: dict[str, Any] = dict.fromkeys(
        ("T", "N", "K", "x_row", "x_col", "w_group", "w_n", "w_k", "out_row"), "i32"
    )
    # the strides of the contiguous dims are 1, which the launcher makes constants
    arguments |= _fixed(x_col=1, **{"w_k" if nk else "w_n": 1})
    arguments |= dict.fromkeys(("x_ptr", "w_ptr", "out_ptr"), "*bf16") | {"ends_ptr": "*i32"}
    arguments |= {"source_ptr": "*i32"} if gather else _fixed(source_ptr=None)
    arguments |= {"bias_ptr": "*bf16", "scale_ptr": "*fp32"} if bias else _fixed(bias_ptr=None, scale_ptr=None)
    arguments |= _fixed(x_desc=None, w_desc=None, out_desc=None)
    if descriptors:
        arguments |= {"w_desc": Descriptor("bf16", block), "out_desc": Descriptor("bf16", (tile.rows, tile.columns))}
        arguments |= {} if gather else {"x_desc": Descriptor("bf16", (tile.rows, tile.depth))}
    arguments |= _fixed(GROUPS=32, NK=nk, DESCRIPTORS=descriptors, GATHER=gather, BIAS=bias, SCALE=bias)
    arguments |= constants(tile) | _fixed(PRECISION="ieee")
    return Case(target, plain.rows_kernel, arguments, tile)


def swiglu_rows(
    target: str, *, nk: bool = True, interleaved: bool = False, bias: bool = False, gather: bool = False
) -> Case:
    """An expert's first layer with SwiGLU, the product kept."""
    tile = launch.swiglu_tile(kind(target), 2, 2048, interleaved=interleaved)
    descriptors = target.startswith("sm_") and (nk or not interleaved)
    block = (1, 1, tile.columns, tile.depth) if nk else (1, tile.depth, 1, tile.columns)
    strides = ("x_row", "x_col", "w_group", "w_half", "w_f", "w_k")
    arguments: dict[str, Any] = dict.fromkeys(("T", "F", "K", *strides, "half"), "i32")
    arguments |= _fixed(x_col=1)
    arguments |= _fixed(w_k=1) if nk else _fixed(w_half=1, w_f=2) if interleaved else _fixed(w_f=1)
    arguments |= _fixed(half=1) if interleaved else {}
    arguments |= dict.fromkeys(("x_ptr", "w_ptr", "act_ptr", "gate_up_ptr"), "*bf16")
    arguments |= {"ends_ptr": "*i32", "probs_ptr": "*fp32"}
    arguments |= {"source_ptr": "*i32"} if gather else _fixed(source_ptr=None)
    arguments |= {"bias_ptr": "*bf16"} if bias else _fixed(bias_ptr=None)
    arguments |= _fixed(x_desc=None, w_desc=None)
    if descriptors:
        arguments |= {"w_desc": Descriptor("bf16", block)}
        arguments |= {} if gather else {"x_desc": Descriptor("bf16", (tile.rows, tile.depth))}
    arguments |= _fixed(GROUPS=32, NK=nk, DESCRIPTORS=descriptors, GATHER=gather, BIAS=bias, PROBS=True, KEEP=True)
    arguments |= _fixed(INTERLEAVED=interleaved, **GPT_OSS) | constants(tile) | _fixed(PRECISION="ieee")
    return Case(target, fused.swiglu_rows_kernel, arguments, tile)


def wgrad(target: str, *, accumulate: bool = False, gather: bool = False) -> Case:
    """The weight gradient, layout "nk": b is x."""
    tile = launch.wgrad_tile(kind(target), 2, 4096, fp32=accumulate)
    descriptors = target.startswith("sm_")
    strides = ("a_row", "a_col", "b_row", "b_col", "out_group", "out_a", "out_b")
    arguments: dict[str, Any] = dict.fromkeys(("T", "A", "B", *strides), "i32") | {"ends_ptr": "*i32"}
    arguments |= _fixed(a_col=1, b_col=1, out_b=1, a_desc=None, b_desc=None)
    arguments |= {"source_ptr": "*i32"} if gather else _fixed(source_ptr=None)
    arguments |= {"a_ptr": "*bf16", "b_ptr": "*bf16", "out_ptr": "*fp32" if accumulate else "*bf16"}
    if descriptors:
        arguments |= {"a_desc": Descriptor("bf16", (tile.depth, tile.rows))}
        arguments |= {} if gather else {"b_desc": Descriptor("bf16", (tile.depth, tile.columns))}
    arguments |= _fixed(GROUPS=32, DESCRIPTORS=descriptors, GATHER_A=False, GATHER_B=gather, ACCUMULATE=accumulate)
    arguments |= constants(tile) | _fixed(PRECISION="ieee")
    return Case(target, plain.wgrad_kernel, arguments, tile)


def swiglu_forward(target: str, *, interleaved: bool = False) -> Case:
    return _swiglu(target, swiglu.forward_kernel, ("x_ptr", "out_ptr"), ("x_row",), interleaved)


def swiglu_backward(target: str, *, interleaved: bool = False) -> Case:
    names = ("grad_ptr", "x_ptr", "grad_x_ptr")
    return _swiglu(target, swiglu.backward_kernel, names, ("grad_row", "x_row"), interleaved)


def _swiglu(target, kernel, pointers, strides, interleaved) -> Case:
    block = swiglu_launch.block(kind(target), 2048)
    arguments: dict[str, Any] = dict.fromkeys(pointers, "*bf16") | dict.fromkeys(("S", "F", *strides), "i32")
    arguments |= {"probs_ptr": "*fp32", "grad_probs_ptr": "*fp32", "end_ptr": "*i32"}
    arguments |= _fixed(ENDS=True, PROBS=True, INTERLEAVED=interleaved, **GPT_OSS)
    arguments |= _fixed(ROWS=block.rows, COLUMNS=block.columns)
    return Case(target, kernel, arguments, block)


def gather_sum(target: str) -> Case:
    arguments: dict[str, Any] = {"rows_ptr": "*bf16", "slots_ptr": "*i64", "out_ptr": "*bf16", "end_ptr": "*i32"}
    block = launch.gather_block(kind(target))
    arguments |= dict.fromkeys(("T", "S", "D", "rows_row"), "i32")
    arguments |= _fixed(rows_col=1, COPIES=8, ROWS=block.rows, COLUMNS=block.columns)
    return Case(target, plain.gather_sum_kernel, arguments, block)


PRODUCTS: dict[str, Callable[[str], Case]] = {
    "rows nk": rows,
    "rows kn": lambda target: rows(target, nk=False),
    "rows nk, bias": lambda target: rows(target, bias=True),
    "rows nk, gathered": lambda target: rows(target, gather=True),
    "rows nk, SwiGLU stacked": swiglu_rows,
    "rows kn, SwiGLU stacked": lambda target: swiglu_rows(target, nk=False),
    "rows nk, SwiGLU interleaved": lambda target: swiglu_rows(target, interleaved=True),
    "rows kn, SwiGLU interleaved": lambda target: swiglu_rows(target, nk=False, interleaved=True),
    "rows nk, SwiGLU stacked, bias, gathered": lambda target: swiglu_rows(target, bias=True, gather=True),
    "weight gradient, written": wgrad,
    "weight gradient, added": lambda target: wgrad(target, accumulate=True),
    "weight gradient, gathered, written": lambda target: wgrad(target, gather=True),
    "weight gradient, gathered, added": lambda target: wgrad(target, accumulate=True, gather=True),
}
STREAMS: dict[str, Callable[[str], Case]] = {
    "SwiGLU stacked": swiglu_forward,
    "SwiGLU interleaved": lambda target: swiglu_forward(target, interleaved=True),
    "SwiGLU's gradient, stacked": swiglu_backward,
    "SwiGLU's gradient, interleaved": lambda target: swiglu_backward(target, interleaved=True),
    "gathered rows' gradient": gather_sum,
}

"""SwiGLU and its gradient on Hopper, quantized before they are written: Gluon alone, no torch.

A program has a tile of 128 rows and columns, as in `quantize/hopper_kernels.py`. It is copied to shared memory and
computed 16 rows at a time, as they come; what comes out, rounded to bf16, takes the place of what went in and is
quantized from there. The formulas are `triton_kernels.py`'s, instruction for instruction, so that the bits are the
same; in assembly, since all that a tile has in between would not fit the registers.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from maniple.kernels.quantize.hopper_kernels import DEEP, STACK, WORDS, along_rows, down_columns, place, tall

_NUMBERS = "shl.b32 t, {word}, 16; mov.b32 {name}0, t; and.b32 t, {word}, 0xffff0000; mov.b32 {name}1, t; "
# u + 0 takes -0 to 0, as an offset of zero does. e is 2^-126 and less where it is flushed to zero, and 1 + e is 1
_SIGMOID = (
    "add.f32 u{i}, u{i}, 0f00000000; mul.f32 e, g{i}, 0fBFB8AA3B; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3F800000; "
    "div.full.f32 a, 0f3F800000, e; mul.f32 m, u{i}, g{i}; mul.f32 m, m, a; "
)
_FORWARD = _SIGMOID + "mul.f32 h{i}, m, $3; "
_BACKWARD = _SIGMOID + (
    "{part} sub.f32 e, 0f3F800000, a; fma.rn.f32 e, e, g{i}, 0f3F800000; mul.f32 m, d{i}, $6; "
    "mul.f32 h{i}, m, g{i}; mul.f32 h{i}, h{i}, a; mul.f32 m, m, u{i}; mul.f32 m, m, a; mul.f32 g{i}, m, e; "
)
_REGISTERS = ".reg .b32 t; .reg .f32 a, e, m, d<2>, g<2>, u<2>, h<2>; "


def _assembly(*lines: str):
    return gl.constexpr("{ " + _REGISTERS + "".join(lines) + "}")


FORWARD = _assembly(
    _NUMBERS.format(name="g", word="$1"),
    _NUMBERS.format(name="u", word="$2"),
    _FORWARD.format(i=0),
    _FORWARD.format(i=1),
    "cvt.rn.bf16x2.f32 $0, h1, h0; ",
)
BACKWARD = _assembly(
    _NUMBERS.format(name="d", word="$3"),
    _NUMBERS.format(name="g", word="$4"),
    _NUMBERS.format(name="u", word="$5"),
    _BACKWARD.format(i=0, part="mul.f32 $2, m, d0;"),
    _BACKWARD.format(i=1, part="fma.rn.f32 $2, m, d1, $2;"),
    "cvt.rn.bf16x2.f32 $0, g1, g0; cvt.rn.bf16x2.f32 $1, h1, h0; ",
)


@gluon.constexpr_function
def _flat(warps):
    """The layout of rows of WORDS that are copied and computed: 4 words of a row a thread."""
    return gl.BlockedLayout([1, 4], [2, 16], [warps, 1], [1, 0])


@gluon.jit
def _bring(smem, ptr, stride, q: gl.constexpr, rows, WARPS: gl.constexpr):
    """Copies rows 16 q and on of a tile to shared memory, and zeros for those that are none of it."""
    layout: gl.constexpr = _flat(WARPS)
    row = q * DEEP + gl.arange(0, DEEP, gl.SliceLayout(1, layout))[:, None]
    w = gl.arange(0, WORDS, gl.SliceLayout(0, layout))[None, :]
    async_copy.async_copy_global_to_shared(smem.slice(q * DEEP, DEEP), ptr + (row * stride + w), mask=row < rows)


@gluon.jit
def _room():
    return gl.allocate_shared_memory(gl.int32, [STACK * DEEP, WORDS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def _probs(ptr, rows, WARPS: gl.constexpr):
    """Shared memory with a tile's routing weights."""
    row = gl.arange(0, STACK * DEEP, gl.BlockedLayout([1], [32], [WARPS], [0]))
    smem = gl.allocate_shared_memory(gl.float32, [STACK * DEEP], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    smem.store(gl.load(ptr + row, mask=row < rows, other=0.0))
    return smem


@gluon.jit
def forward_kernel(
    x_ptr,
    probs_ptr,
    ends_ptr,
    padded_ptr,
    along_ptr,
    along_scale_ptr,
    down_ptr,
    down_scale_ptr,
    F,
    S,
    P,
    x_row,
    GROUPS: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK: gl.constexpr,
    E8M0: gl.constexpr,
    FORMAT: gl.constexpr,
    ROUNDING: gl.constexpr,
    WARPS: gl.constexpr,
):
    """`probs[s] * up[s] * silu(gate[s])` `[S, F]`, quantized as `quantize/hopper_kernels.rows_kernel` does.

    x `[S, 2F]` in words of two numbers, gate columns first, x_row of them a row; F a multiple of 128; probs fp32 `[S]`.
    Either output pointer may be None.
    """
    column_tiles = F // (2 * WORDS)
    first = gl.program_id(0) // column_tiles * 128
    column_tile = gl.program_id(0) % column_tiles
    top, end = place(first, ends_ptr, padded_ptr, GROUPS, WIDTH, WARPS)
    rows = end - top
    if rows > 0:
        gate_ptr = x_ptr + (top.to(gl.int64) * x_row + column_tile * WORDS)
        gate_smem, up_smem = _room(), _room()
        for q in gl.static_range(STACK):
            _bring(gate_smem, gate_ptr, x_row, q, rows, WARPS)
            _bring(up_smem, gate_ptr + F // 2, x_row, q, rows, WARPS)
            async_copy.commit_group()
        probs_smem = _probs(probs_ptr + top, rows, WARPS)
        part: gl.constexpr = _flat(WARPS)
        for q in gl.static_range(STACK):
            async_copy.wait_group(STACK - 1 - q)
            gate = gate_smem.slice(q * DEEP, DEEP).load(part)
            up = up_smem.slice(q * DEEP, DEEP).load(part)
            probs = probs_smem.slice(q * DEEP, DEEP).load(gl.SliceLayout(1, part))
            probs, gate = gl.broadcast(probs.expand_dims(1), gate)
            out = gl.inline_asm_elementwise(
                FORWARD, "=r,r,r,f", [gate, up, probs], dtype=gl.int32, is_pure=True, pack=1
            )
            gate_smem.slice(q * DEEP, DEEP).store(out)
        out = gate_smem.reshape([STACK, DEEP, WORDS]).load(tall(WARPS))
        if down_ptr is not None:
            down_columns(out, down_ptr, down_scale_ptr, first, column_tile, F, P, BLOCK, E8M0, FORMAT, ROUNDING, WARPS)
        if along_ptr is not None:
            along_rows(
                out, along_ptr, along_scale_ptr, top, rows, column_tile, F, S, BLOCK, E8M0, FORMAT, ROUNDING, WARPS
            )


@gluon.jit
def backward_kernel(
    grad_ptr,
    x_ptr,
    probs_ptr,
    parts_ptr,
    ends_ptr,
    padded_ptr,
    along_ptr,
    along_scale_ptr,
    down_ptr,
    down_scale_ptr,
    F,
    S,
    P,
    grad_row,
    x_row,
    GROUPS: gl.constexpr,
    WIDTH: gl.constexpr,
    BLOCK: gl.constexpr,
    E8M0: gl.constexpr,
    FORMAT: gl.constexpr,
    ROUNDING: gl.constexpr,
    WARPS: gl.constexpr,
):
    """The gradient of x `[S, 2F]`, quantized likewise. grad `[S, F]` in words, grad_row of them a row.

    parts fp32 `[F / 128, S]`: the gradient of probs as the sums of column tiles.
    """
    column_tiles = F // (2 * WORDS)
    first = gl.program_id(0) // column_tiles * 128
    column_tile = gl.program_id(0) % column_tiles
    top, end = place(first, ends_ptr, padded_ptr, GROUPS, WIDTH, WARPS)
    rows = end - top
    if rows > 0:
        d_ptr = grad_ptr + (top.to(gl.int64) * grad_row + column_tile * WORDS)
        gate_ptr = x_ptr + (top.to(gl.int64) * x_row + column_tile * WORDS)
        grad_smem, gate_smem, up_smem = _room(), _room(), _room()
        for q in gl.static_range(STACK):
            _bring(grad_smem, d_ptr, grad_row, q, rows, WARPS)
            _bring(gate_smem, gate_ptr, x_row, q, rows, WARPS)
            _bring(up_smem, gate_ptr + F // 2, x_row, q, rows, WARPS)
            async_copy.commit_group()
        probs_smem = _probs(probs_ptr + top, rows, WARPS)
        part: gl.constexpr = _flat(WARPS)
        for q in gl.static_range(STACK):
            async_copy.wait_group(STACK - 1 - q)
            row = q * DEEP + gl.arange(0, DEEP, gl.SliceLayout(1, part))
            grad = grad_smem.slice(q * DEEP, DEEP).load(part)
            gate = gate_smem.slice(q * DEEP, DEEP).load(part)
            up = up_smem.slice(q * DEEP, DEEP).load(part)
            probs = probs_smem.slice(q * DEEP, DEEP).load(gl.SliceLayout(1, part))
            probs, gate = gl.broadcast(probs.expand_dims(1), gate)
            gate, up, sums = gl.inline_asm_elementwise(
                BACKWARD,
                "=&r,=&r,=&f,r,r,r,f",
                [grad, gate, up, probs],
                dtype=(gl.int32, gl.int32, gl.float32),
                is_pure=True,
                pack=1,
            )
            gate_smem.slice(q * DEEP, DEEP).store(gate)
            up_smem.slice(q * DEEP, DEEP).store(up)
            gl.store(parts_ptr + (column_tile.to(gl.int64) * S + top) + row, gl.sum(sums, 1), mask=row < rows)
        for half in gl.static_range(2):
            out = (up_smem if half else gate_smem).reshape([STACK, DEEP, WORDS]).load(tall(WARPS))
            tile = column_tile + half * column_tiles
            if down_ptr is not None:
                down_columns(out, down_ptr, down_scale_ptr, first, tile, 2 * F, P, BLOCK, E8M0, FORMAT, ROUNDING, WARPS)
            if along_ptr is not None:
                along_rows(
                    out, along_ptr, along_scale_ptr, top, rows, tile, 2 * F, S, BLOCK, E8M0, FORMAT, ROUNDING, WARPS
                )

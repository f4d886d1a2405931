"""The float8 grouped GEMM kernel for Hopper, weight gradients: Gluon alone, no torch.

`hopper_fp8.py` says how it works and launches it.

BLOCK: fp32 scales for every 128 of the contraction, in both operands; else one scale a matrix.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from maniple.kernels.grouped_gemm.hopper_fp32 import halves, put_block
from maniple.kernels.grouped_gemm.hopper_kernels import place


@gluon.jit
def _load_wgrad(
    a_desc,
    b_desc,
    a_scale_desc,
    b_scale_desc,
    ends_ptr,
    a_smem,
    b_smem,
    a_scale_smem,
    b_scale_smem,
    full,
    empty,
    A,
    B,
    GROUPS: gl.constexpr,
    BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    BYTES: gl.constexpr = (ROWS + COLUMNS) * (132 if BLOCK else 128)
    a_tiles = gl.cdiv(A, ROWS)
    b_tiles = gl.cdiv(B, COLUMNS)
    turn = 0
    for tile in range(gl.program_id(0), GROUPS * a_tiles * b_tiles, gl.num_programs(0)):
        g = tile // (a_tiles * b_tiles)
        i, j = place(tile % (a_tiles * b_tiles), a_tiles, b_tiles, BAND)
        start = gl.load(ends_ptr + g - 1, mask=g > 0, other=0)
        end = gl.load(ends_ptr + g)
        a0 = i * ROWS
        a1 = a0 + ROWS // 2
        b0 = j * COLUMNS
        for p in range(start, end, 128):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, BYTES)
            tma.async_copy_global_to_shared(a_desc, [a0, p], loaded, a_smem.index(2 * stage))
            tma.async_copy_global_to_shared(a_desc, [a1, p], loaded, a_smem.index(2 * stage + 1))
            tma.async_copy_global_to_shared(b_desc, [b0, p], loaded, b_smem.index(stage))
            if BLOCK:
                block = p // 128
                a_scales = block * A
                tma.async_copy_global_to_shared(a_scale_desc, [a_scales + a0], loaded, a_scale_smem.index(2 * stage))
                tma.async_copy_global_to_shared(
                    a_scale_desc, [a_scales + a1], loaded, a_scale_smem.index(2 * stage + 1)
                )
                tma.async_copy_global_to_shared(b_scale_desc, [block * B + b0], loaded, b_scale_smem.index(stage))
            turn += 1


@gluon.jit
def _finish_wgrad(acc, out_desc, this, other, g, a0, b0, ACCUMULATE: gl.constexpr, PENDING: gl.constexpr):
    """this, other: room for a block of the result, of which there may be one only. PENDING: 1 if there are two."""
    if out_desc.dtype == gl.float32:
        left, right = halves(acc, 128)
        put_block(out_desc, left, this, g, a0, b0, ACCUMULATE, PENDING)
        put_block(out_desc, right, other, g, a0, b0 + 64, ACCUMULATE, PENDING)
    else:
        tma.store_wait(PENDING)
        this.store(acc.to(out_desc.dtype).reshape((1, 64, 128)))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [g, a0, b0], this)


@gluon.jit
def _compute_wgrad(
    out_desc,
    ends_ptr,
    a_scale_ptr,
    b_scale_ptr,
    a_smem,
    b_smem,
    a_scale_smem,
    b_scale_smem,
    out_smem,
    full,
    empty,
    A,
    B,
    HALF: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    WIDE: gl.constexpr = COLUMNS == 256
    FP32: gl.constexpr = out_desc.dtype == gl.float32
    a_tiles = gl.cdiv(A, ROWS)
    b_tiles = gl.cdiv(B, COLUMNS)
    zero = gl.zeros((64, 128), gl.float32, MMA)
    turn = 0
    for tile in range(gl.program_id(0), GROUPS * a_tiles * b_tiles, gl.num_programs(0)):
        g = tile // (a_tiles * b_tiles)
        i, j = place(tile % (a_tiles * b_tiles), a_tiles, b_tiles, BAND)
        start = gl.load(ends_ptr + g - 1, mask=g > 0, other=0)
        end = gl.load(ends_ptr + g)
        a0 = i * ROWS + HALF * 64
        b0 = j * COLUMNS
        left = zero
        right = zero
        for _ in range(start, end, 128):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            a = a_smem.index(2 * stage + HALF)
            b = b_smem.index(stage)
            b_scales = b_scale_smem.index(stage)
            part = warpgroup_mma(a, b.slice(0, 128, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
            if BLOCK:
                a_scale = a_scale_smem.index(2 * stage + HALF).load(gl.SliceLayout(1, MMA))
            part = warpgroup_mma_wait(0, deps=(part,))
            if BLOCK:
                b_scale = b_scales.slice(0, 128, dim=0).load(gl.SliceLayout(0, MMA))
                part = part * a_scale[:, None] * b_scale[None, :]
            left += part
            if WIDE:
                part = warpgroup_mma(a, b.slice(128, 128, dim=0).permute((1, 0)), part, use_acc=False, is_async=True)
                part = warpgroup_mma_wait(0, deps=(part,))
                if BLOCK:
                    b_scale = b_scales.slice(128, 128, dim=0).load(gl.SliceLayout(0, MMA))
                    part = part * a_scale[:, None] * b_scale[None, :]
                right += part
            mbarrier.arrive(empty.index(stage), count=1)
            turn += 1
        if not BLOCK:
            scale = gl.load(a_scale_ptr) * gl.load(b_scale_ptr)
            left *= scale
            right *= scale
        if start < end or not ACCUMULATE:
            this = out_smem.index(HALF * BUFFERS)
            other = out_smem.index(HALF * BUFFERS + BUFFERS - 1)
            # a block that is written is the tile's only one where it is narrow: the last one went out of the same room
            _finish_wgrad(left, out_desc, this, other, g, a0, b0, ACCUMULATE, BUFFERS - 1 if WIDE or FP32 else 0)
            if WIDE and FP32:
                _finish_wgrad(right, out_desc, this, other, g, a0, b0 + 128, ACCUMULATE, BUFFERS - 1)
            elif WIDE:
                _finish_wgrad(right, out_desc, other, this, g, a0, b0 + 128, ACCUMULATE, BUFFERS - 1)
    tma.store_wait(0)


@gluon.jit
def wgrad_kernel(
    a_desc,
    b_desc,
    a_scale_desc,
    b_scale_desc,
    out_desc,
    ends_ptr,
    a_scale_ptr,
    b_scale_ptr,
    A,
    B,
    GROUPS: gl.constexpr,
    BLOCK: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
    LOADER: gl.constexpr,
    CONSUMER: gl.constexpr,
    num_warps: gl.constexpr,
):
    """`out[g] (+)= a[:, columns of g] @ b[:, columns of g]ᵀ`; a `[A, P]`, b `[B, P]` float8, out bf16 or fp32.

    Columns of groups end at `ends`, multiples of 128. Block p of row r has its scale at `p * A + r` (b: `p * B + r`).
    """
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, ROWS // 2, 128], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, COLUMNS, 128], b_desc.layout)
    a_scale_smem = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS // 2], a_scale_desc.layout)
    b_scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMNS], b_scale_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 * BUFFERS] + out_desc.block_type.shape, out_desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    # fmt: off
    gl.warp_specialize(
        [
            (_compute_wgrad, (
                out_desc, ends_ptr, a_scale_ptr, b_scale_ptr, a_smem, b_smem, a_scale_smem, b_scale_smem,
                out_smem, full, empty, A, B, gl.constexpr(0),
                GROUPS, BLOCK, ACCUMULATE, ROWS, COLUMNS, STAGES, BUFFERS, BAND,
            )),
            (_compute_wgrad, (
                out_desc, ends_ptr, a_scale_ptr, b_scale_ptr, a_smem, b_smem, a_scale_smem, b_scale_smem,
                out_smem, full, empty, A, B, gl.constexpr(1),
                GROUPS, BLOCK, ACCUMULATE, ROWS, COLUMNS, STAGES, BUFFERS, BAND,
            )),
            (_load_wgrad, (
                a_desc, b_desc, a_scale_desc, b_scale_desc, ends_ptr, a_smem, b_smem, a_scale_smem, b_scale_smem,
                full, empty, A, B, GROUPS, BLOCK, ROWS, COLUMNS, STAGES, BAND,
            )),
        ],
        [4, 1],
        [CONSUMER, LOADER],
    )
    # fmt: on

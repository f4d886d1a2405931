"""The weight gradient for Hopper in bf16: Gluon alone, no torch, so that another framework can launch it.

`hopper.py` says how it works and launches it.
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
    ends_ptr,
    a_smem,
    b_smem,
    full,
    empty,
    A,
    B,
    GROUPS: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    BYTES: gl.constexpr = (ROWS + COLUMNS) * DEPTH * 2
    a_tiles = gl.cdiv(A, ROWS)
    b_tiles = gl.cdiv(B, COLUMNS)
    turn = 0
    for tile in range(gl.program_id(0), GROUPS * a_tiles * b_tiles, gl.num_programs(0)):
        g = tile // (a_tiles * b_tiles)
        i, j = place(tile % (a_tiles * b_tiles), a_tiles, b_tiles, BAND)
        start = gl.load(ends_ptr + g - 1, mask=g > 0, other=0)
        end = gl.load(ends_ptr + g)
        for s in range(start, end, DEPTH):
            stage = turn % STAGES
            mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
            loaded = full.index(stage)
            mbarrier.expect(loaded, BYTES)
            tma.async_copy_global_to_shared(a_desc, [s, i * ROWS], loaded, a_smem.index(2 * stage))
            tma.async_copy_global_to_shared(a_desc, [s, i * ROWS + ROWS // 2], loaded, a_smem.index(2 * stage + 1))
            tma.async_copy_global_to_shared(b_desc, [s, j * COLUMNS], loaded, b_smem.index(stage))
            turn += 1


@gluon.jit
def _zero_from(tile, row, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    values = tile.load(LAYOUT)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    tile.store(gl.where((rows < row)[:, None], values, gl.zeros_like(values)))  # a product with zero would keep a NaN


@gluon.jit
def _compute_wgrad(
    out_desc,
    ends_ptr,
    a_smem,
    b_smem,
    out_smem,
    full,
    empty,
    zeroed,
    A,
    B,
    HALF: gl.constexpr,
    GROUPS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    a_tiles = gl.cdiv(A, ROWS)
    b_tiles = gl.cdiv(B, COLUMNS)
    turn = 0
    tails = 0
    for tile in range(gl.program_id(0), GROUPS * a_tiles * b_tiles, gl.num_programs(0)):
        g = tile // (a_tiles * b_tiles)
        i, j = place(tile % (a_tiles * b_tiles), a_tiles, b_tiles, BAND)
        start = gl.load(ends_ptr + g - 1, mask=g > 0, other=0)
        end = gl.load(ends_ptr + g)
        a0 = i * ROWS + HALF * (ROWS // 2)
        b0 = j * COLUMNS
        acc = gl.zeros((ROWS // 2, COLUMNS), gl.float32, MMA)
        for s in range(start, end, DEPTH):
            stage = turn % STAGES
            mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
            a = a_smem.index(2 * stage + HALF)
            b = b_smem.index(stage)
            if s + DEPTH > end:
                # each warpgroup clears its own rows of a and half of b, which both read
                _zero_from(a, end - s, DEPTH, ROWS // 2)
                _zero_from(b.slice(HALF * (COLUMNS // 2), COLUMNS // 2, dim=1), end - s, DEPTH, COLUMNS // 2)
                fence_async_shared()
                gl.thread_barrier()
                mbarrier.arrive(zeroed, count=1)
                mbarrier.wait(zeroed, tails & 1)
                tails += 1
            acc = warpgroup_mma(a.permute((1, 0)), b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=s > start)
            turn += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=start < end)
        if out_desc.dtype == gl.float32:
            if start < end or not ACCUMULATE:
                this = out_smem.index(HALF * BUFFERS)
                other = out_smem.index(HALF * BUFFERS + BUFFERS - 1)
                left, right = halves(acc, COLUMNS)
                if COLUMNS == 256:
                    first, second = halves(left, 128)
                    third, fourth = halves(right, 128)
                    put_block(out_desc, first, this, g, a0, b0, ACCUMULATE, BUFFERS - 1)
                    put_block(out_desc, second, other, g, a0, b0 + 64, ACCUMULATE, BUFFERS - 1)
                    put_block(out_desc, third, this, g, a0, b0 + 128, ACCUMULATE, BUFFERS - 1)
                    put_block(out_desc, fourth, other, g, a0, b0 + 192, ACCUMULATE, BUFFERS - 1)
                else:
                    put_block(out_desc, left, this, g, a0, b0, ACCUMULATE, BUFFERS - 1)
                    put_block(out_desc, right, other, g, a0, b0 + 64, ACCUMULATE, BUFFERS - 1)
        else:
            staged = out_smem.index(HALF * BUFFERS)
            tma.store_wait(0)
            staged.store(acc.to(out_desc.dtype).reshape((1, ROWS // 2, COLUMNS)))
            fence_async_shared()
            tma.async_copy_shared_to_global(out_desc, [g, a0, b0], staged)
    tma.store_wait(0)


@gluon.jit
def wgrad_kernel(
    a_desc,
    b_desc,
    out_desc,
    ends_ptr,
    A,
    B,
    GROUPS: gl.constexpr,
    ACCUMULATE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
    LOADER: gl.constexpr,
    CONSUMER: gl.constexpr,
    num_warps: gl.constexpr,
):
    """`out[g] (+)= a[rows of g]ᵀ @ b[rows of g]`; a `[S, A]`, b `[S, B]` bf16, out `[G, A, B]` bf16, or fp32."""
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [2 * STAGES, DEPTH, ROWS // 2], a_desc.layout)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES, DEPTH, COLUMNS], b_desc.layout)
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 * BUFFERS] + out_desc.block_type.shape, out_desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    zeroed = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    mbarrier.init(zeroed, count=2)
    # fmt: off
    gl.warp_specialize(
        [
            (_compute_wgrad, (
                out_desc, ends_ptr, a_smem, b_smem, out_smem, full, empty, zeroed, A, B,
                gl.constexpr(0),
                GROUPS, ACCUMULATE, ROWS, COLUMNS, DEPTH, STAGES, BUFFERS, BAND,
            )),
            (_compute_wgrad, (
                out_desc, ends_ptr, a_smem, b_smem, out_smem, full, empty, zeroed, A, B,
                gl.constexpr(1),
                GROUPS, ACCUMULATE, ROWS, COLUMNS, DEPTH, STAGES, BUFFERS, BAND,
            )),
            (_load_wgrad, (
                a_desc, b_desc, ends_ptr, a_smem, b_smem, full, empty, A, B,
                GROUPS, ROWS, COLUMNS, DEPTH, STAGES, BAND,
            )),
        ],
        [4, 1],
        [CONSUMER, LOADER],
    )
    # fmt: on

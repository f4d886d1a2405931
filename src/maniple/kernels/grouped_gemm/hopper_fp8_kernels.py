"""The float8 grouped GEMM kernel for Hopper, rows times weights: Gluon alone, no torch.

`hopper_fp8.py` says how it works and launches it.

BLOCK: fp32 scales for every 128 of the contraction, in both operands; else one scale a matrix.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from maniple.kernels.grouped_gemm.hopper_kernels import place


@gluon.jit
def _load_rows(
    x_desc,
    w_desc,
    ends_ptr,
    x_scale_ptr,
    w_scale_ptr,
    a_smem,
    b_smem,
    scale_smem,
    w_scale_smem,
    full,
    empty,
    N,
    K,
    x_scale_block,
    w_scale_group,
    w_scale_row,
    w_scale_block,
    GROUPS: gl.constexpr,
    BLOCK: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    HALF_BYTES: gl.constexpr = ROWS // 2 * 128
    BYTES: gl.constexpr = 2 * HALF_BYTES + COLUMNS * 128
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    column_tiles = gl.cdiv(N, COLUMNS)
    tile = gl.program_id(0)
    first = 0
    start = 0
    turn = 0
    ahead = gl.load(ends_ptr)
    for g in range(GROUPS):
        end = ahead  # read a group ahead: programs pass many groups between two tiles
        ahead = gl.load(ends_ptr + g + 1, mask=g + 1 < GROUPS, other=0)
        row_tiles = gl.cdiv(end - start, ROWS)
        last = first + row_tiles * column_tiles
        while tile < last:
            i, j = place(tile - first, row_tiles, column_tiles, BAND)
            row0 = start + i * ROWS
            row1 = row0 + ROWS // 2
            n0 = j * COLUMNS
            both = row1 < end
            if BLOCK:
                rows = row0 + gl.arange(0, ROWS, LANES)
                inside = rows < end
                part = gl.arange(0, COLUMNS // 128, LANES)
                w_scales = w_scale_ptr + gl.cast(g, gl.int64) * w_scale_group + (n0 // 128 + part) * w_scale_row
                within = n0 + part * 128 < N
            for block in range(gl.cdiv(K, 128)):
                stage = turn % STAGES
                mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                loaded = full.index(stage)
                if BLOCK:  # before the barrier expects anything, so that it waits for these too
                    scales = x_scale_ptr + block * x_scale_block + rows
                    async_copy.async_copy_global_to_shared(scale_smem.index(stage), scales, mask=inside)
                    async_copy.async_copy_global_to_shared(
                        w_scale_smem.index(stage), w_scales + block * w_scale_block, mask=within
                    )
                    async_copy.mbarrier_arrive(loaded)
                mbarrier.expect(loaded, BYTES, pred=both)
                mbarrier.expect(loaded, BYTES - HALF_BYTES, pred=not both)
                tma.async_copy_global_to_shared(x_desc, [row0, block * 128], loaded, a_smem.index(2 * stage))
                tma.async_copy_global_to_shared(
                    x_desc, [row1, block * 128], loaded, a_smem.index(2 * stage + 1), pred=both
                )
                tma.async_copy_global_to_shared(w_desc, [g, n0, block * 128], loaded, b_smem.index(stage))
                turn += 1
            tile += gl.num_programs(0)
        first = last
        start = end


@gluon.jit
def _store_rows(
    acc,
    out_desc,
    out_ptr,
    bias_ptr,
    bias_scale_ptr,
    staged,
    g,
    row0,
    n0,
    end,
    N,
    out_row,
    BIAS: gl.constexpr,
    SCALE: gl.constexpr,
    PENDING: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    rows = row0 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    columns = n0 + gl.arange(0, 128, gl.SliceLayout(0, MMA))
    if BIAS:
        bias = gl.load(bias_ptr + gl.cast(g, gl.int64) * N + columns, mask=columns < N, other=0.0).to(gl.float32)
        if SCALE:
            scale = gl.load(bias_scale_ptr + rows, mask=rows < end, other=0.0).to(gl.float32)
            acc += scale[:, None] * bias[None, :]
        else:
            acc += bias[None, :]
    if row0 + 64 <= end:
        tma.store_wait(PENDING)
        staged.store(acc.to(out_desc.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [row0, n0], staged)
    else:
        ptrs = out_ptr + rows.to(gl.int64)[:, None] * out_row + columns[None, :]
        gl.store(ptrs, acc.to(out_desc.dtype), mask=(rows < end)[:, None] & (columns < N)[None, :])


@gluon.jit
def _compute_rows(
    out_desc,
    out_ptr,
    ends_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    bias_scale_ptr,
    a_smem,
    b_smem,
    scale_smem,
    w_scale_smem,
    out_smem,
    full,
    empty,
    N,
    K,
    w_scale_group,
    out_row,
    HALF: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCK: gl.constexpr,
    BIAS: gl.constexpr,
    SCALE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    WIDE: gl.constexpr = COLUMNS == 256  # two products of 128 columns, one after the other
    column_tiles = gl.cdiv(N, COLUMNS)
    blocks = gl.cdiv(K, 128)
    zero = gl.zeros((64, 128), gl.float32, MMA)
    tile = gl.program_id(0)
    first = 0
    start = 0
    turn = 0
    ahead = gl.load(ends_ptr)
    for g in range(GROUPS):
        end = ahead  # read a group ahead: programs pass many groups between two tiles
        ahead = gl.load(ends_ptr + g + 1, mask=g + 1 < GROUPS, other=0)
        row_tiles = gl.cdiv(end - start, ROWS)
        last = first + row_tiles * column_tiles
        while tile < last:
            i, j = place(tile - first, row_tiles, column_tiles, BAND)
            row0 = start + i * ROWS + HALF * 64
            n0 = j * COLUMNS
            if row0 < end:
                left = zero
                right = zero
                for _ in range(blocks):
                    stage = turn % STAGES
                    mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                    a = a_smem.index(2 * stage + HALF)
                    b = b_smem.index(stage).reshape((COLUMNS, 128))
                    part = warpgroup_mma(a, b.slice(0, 128, dim=0).permute((1, 0)), zero, use_acc=False, is_async=True)
                    if BLOCK:  # scales are read while the product runs
                        x_scale = scale_smem.index(stage).slice(HALF * 64, 64).load(gl.SliceLayout(1, MMA))
                        w_scale = w_scale_smem.index(stage)
                        scale = x_scale * w_scale.slice(0, 1).load(gl.SliceLayout(1, MMA))
                        if WIDE:
                            scale_beside = x_scale * w_scale.slice(1, 1).load(gl.SliceLayout(1, MMA))
                    part = warpgroup_mma_wait(0, deps=(part,))
                    if not WIDE:
                        mbarrier.arrive(empty.index(stage), count=1)
                    left += part * scale[:, None] if BLOCK else part
                    if WIDE:
                        part = warpgroup_mma(
                            a, b.slice(128, 128, dim=0).permute((1, 0)), part, use_acc=False, is_async=True
                        )
                        part = warpgroup_mma_wait(0, deps=(part,))
                        mbarrier.arrive(empty.index(stage), count=1)
                        right += part * scale_beside[:, None] if BLOCK else part
                    turn += 1
                if not BLOCK:
                    scale = gl.load(x_scale_ptr) * gl.load(w_scale_ptr + gl.cast(g, gl.int64) * w_scale_group)
                    left *= scale
                    right *= scale
                # fmt: off
                _store_rows(
                    left, out_desc, out_ptr, bias_ptr, bias_scale_ptr, out_smem.index(HALF * BUFFERS),
                    g, row0, n0, end, N, out_row, BIAS, SCALE, BUFFERS - 1,
                )
                if WIDE:
                    _store_rows(
                        right, out_desc, out_ptr, bias_ptr, bias_scale_ptr,
                        out_smem.index(HALF * BUFFERS + BUFFERS - 1),
                        g, row0, n0 + 128, end, N, out_row, BIAS, SCALE, BUFFERS - 1,
                    )
                # fmt: on
            else:  # the group ends in the other half: nothing to compute, and the tile takes half the time
                for _ in range(blocks):
                    stage = turn % STAGES
                    mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                    mbarrier.arrive(empty.index(stage), count=1)
                    turn += 1
            tile += gl.num_programs(0)
        first = last
        start = end
    tma.store_wait(0)


@gluon.jit
def rows_kernel(
    x_desc,
    w_desc,
    out_desc,
    out_ptr,
    ends_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    bias_scale_ptr,
    N,
    K,
    x_scale_block,
    w_scale_group,
    w_scale_row,
    w_scale_block,
    out_row,
    GROUPS: gl.constexpr,
    BLOCK: gl.constexpr,
    BIAS: gl.constexpr,
    SCALE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    STAGES: gl.constexpr,
    BUFFERS: gl.constexpr,
    BAND: gl.constexpr,
    LOADER: gl.constexpr,
    CONSUMER: gl.constexpr,
    num_warps: gl.constexpr,
):
    """`out[s] = x[s] @ w[g]ᵀ + bias_scale[s] * bias[g]`; x `[S, K]`, w `[G, N, K]` float8, out `[S, N]` bf16.

    x's block scales lie with the rows of a block side by side: block b of row s at `b * x_scale_block + s`.
    """
    # (Gluon's compiler takes neither starred lists nor tuples that are put together)
    a_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS // 2, 128], x_desc.layout)
    b_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, 1, COLUMNS, 128], w_desc.layout)
    scale_smem = gl.allocate_shared_memory(gl.float32, [STAGES, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    w_scale_smem = gl.allocate_shared_memory(
        gl.float32, [STAGES, COLUMNS // 128], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2 * BUFFERS, ROWS // 2, 128], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    # fmt: off
    gl.warp_specialize(
        [
            (_compute_rows, (
                out_desc, out_ptr, ends_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, bias_scale_ptr,
                a_smem, b_smem, scale_smem, w_scale_smem, out_smem, full, empty,
                N, K, w_scale_group, out_row, gl.constexpr(0),
                GROUPS, BLOCK, BIAS, SCALE, ROWS, COLUMNS, STAGES, BUFFERS, BAND,
            )),
            (_compute_rows, (
                out_desc, out_ptr, ends_ptr, x_scale_ptr, w_scale_ptr, bias_ptr, bias_scale_ptr,
                a_smem, b_smem, scale_smem, w_scale_smem, out_smem, full, empty,
                N, K, w_scale_group, out_row, gl.constexpr(1),
                GROUPS, BLOCK, BIAS, SCALE, ROWS, COLUMNS, STAGES, BUFFERS, BAND,
            )),
            (_load_rows, (
                x_desc, w_desc, ends_ptr, x_scale_ptr, w_scale_ptr, a_smem, b_smem, scale_smem, w_scale_smem,
                full, empty, N, K, x_scale_block, w_scale_group, w_scale_row, w_scale_block,
                GROUPS, BLOCK, ROWS, COLUMNS, STAGES, BAND,
            )),
        ],
        [4, 1],
        [CONSUMER, LOADER],
    )
    # fmt: on

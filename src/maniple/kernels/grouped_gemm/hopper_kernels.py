"""Rows times weights for Hopper in bf16: Gluon alone, no torch, so that another framework can launch it.

`hopper.py` says how they work and launches them.
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

from maniple.kernels.grouped_gemm.hopper_fp32 import halves


@gluon.jit
def place(number, row_tiles, column_tiles, BAND: gl.constexpr):
    in_band = BAND * column_tiles
    first = number // in_band * BAND
    height = gl.minimum(row_tiles - first, BAND)
    inner = number % in_band
    return first + inner % height, inner // height


@gluon.jit
def keep_pace(pace_ptr, done, patience):
    """Counts part number `done` of this program as loaded, and waits until every program has loaded the one before.

    Returns the patience that is left: none after a wait in vain, as where not all programs run at the same time.
    """
    gl.atomic_add(pace_ptr, 1, sem="relaxed")
    wanted = (done - 1) * gl.num_programs(0)
    tries = 0
    while (tries < patience) and (gl.load(pace_ptr, volatile=True) < wanted):
        tries += 1
    return gl.where(tries < patience, patience, 0)


@gluon.jit
def leave_pace(pace_ptr):
    gl.atomic_add(pace_ptr, 1 << 23, sem="relaxed")  # nobody waits for a program that has loaded all it will


@gluon.jit
def _load_rows(
    pace_ptr,
    x_desc,
    w_desc,
    ends_ptr,
    a_smem,
    b_smem,
    full,
    empty,
    N,
    K,
    GROUPS: gl.constexpr,
    NK: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    PACE: gl.constexpr,
):
    HALF_BYTES: gl.constexpr = ROWS // 2 * DEPTH * 2
    BYTES: gl.constexpr = 2 * HALF_BYTES + COLUMNS * DEPTH * 2
    column_tiles = gl.cdiv(N, COLUMNS)
    tile = gl.program_id(0)
    first = 0
    start = 0
    turn = 0
    patience = 128
    for g in range(GROUPS):
        end = gl.load(ends_ptr + g)
        row_tiles = gl.cdiv(end - start, ROWS)
        last = first + row_tiles * column_tiles
        while tile < last:
            i, j = place(tile - first, row_tiles, column_tiles, BAND)
            row0 = start + i * ROWS
            n0 = j * COLUMNS
            both = row0 + ROWS // 2 < end
            for k0 in range(0, K, DEPTH):
                if PACE > 0:  # noqa: SIM102 (without a pace the rest must not be compiled)
                    if turn % PACE == 0:
                        patience = keep_pace(pace_ptr, turn // PACE + 1, patience)
                stage = turn % STAGES
                mbarrier.wait(empty.index(stage), ((turn // STAGES) & 1) ^ 1)
                loaded = full.index(stage)
                mbarrier.expect(loaded, BYTES, pred=both)
                mbarrier.expect(loaded, BYTES - HALF_BYTES, pred=not both)
                tma.async_copy_global_to_shared(x_desc, [row0, k0], loaded, a_smem.index(2 * stage))
                tma.async_copy_global_to_shared(
                    x_desc, [row0 + ROWS // 2, k0], loaded, a_smem.index(2 * stage + 1), pred=both
                )
                if NK:
                    tma.async_copy_global_to_shared(w_desc, [g, n0, k0], loaded, b_smem.index(stage))
                else:
                    tma.async_copy_global_to_shared(w_desc, [g, k0, n0], loaded, b_smem.index(stage))
                turn += 1
            tile += gl.num_programs(0)
        first = last
        start = end
    if PACE > 0:
        leave_pace(pace_ptr)


@gluon.jit
def _compute_rows(
    out_desc,
    out_ptr,
    ends_ptr,
    bias_ptr,
    scale_ptr,
    a_smem,
    b_smem,
    out_smem,
    full,
    empty,
    N,
    K,
    out_row,
    HALF: gl.constexpr,
    GROUPS: gl.constexpr,
    NK: gl.constexpr,
    BIAS: gl.constexpr,
    SCALE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BAND: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    column_tiles = gl.cdiv(N, COLUMNS)
    tile = gl.program_id(0)
    first = 0
    start = 0
    turn = 0
    staged = out_smem.index(HALF)
    for g in range(GROUPS):
        end = gl.load(ends_ptr + g)
        row_tiles = gl.cdiv(end - start, ROWS)
        last = first + row_tiles * column_tiles
        while tile < last:
            i, j = place(tile - first, row_tiles, column_tiles, BAND)
            row0 = start + i * ROWS + HALF * (ROWS // 2)
            n0 = j * COLUMNS
            if row0 < end:
                acc = gl.zeros((ROWS // 2, COLUMNS), gl.float32, MMA)
                for k0 in range(0, K, DEPTH):
                    stage = turn % STAGES
                    mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                    if NK:
                        b = b_smem.index(stage).reshape((COLUMNS, DEPTH)).permute((1, 0))
                    else:
                        b = b_smem.index(stage).reshape((DEPTH, COLUMNS))
                    acc = warpgroup_mma(a_smem.index(2 * stage + HALF), b, acc, is_async=True)
                    acc = warpgroup_mma_wait(
                        1, deps=(acc,)
                    )  # the product before is done: its stage may be filled again
                    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=k0 > 0)
                    turn += 1
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
                rows = row0 + gl.arange(0, ROWS // 2, gl.SliceLayout(1, MMA))
                columns = n0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
                if BIAS:
                    bias = gl.load(bias_ptr + gl.cast(g, gl.int64) * N + columns, mask=columns < N, other=0.0).to(
                        gl.float32
                    )
                    if SCALE:
                        scale = gl.load(scale_ptr + rows, mask=rows < end, other=0.0).to(gl.float32)
                        acc += scale[:, None] * bias[None, :]
                    else:
                        acc += bias[None, :]
                if row0 + ROWS // 2 <= end:
                    if PARTS == 1:
                        _store(out_desc, acc, staged, row0, n0)
                    else:
                        left, right = halves(acc, COLUMNS)
                        _store(out_desc, left, staged, row0, n0)
                        _store(out_desc, right, staged, row0, n0 + COLUMNS // 2)
                else:
                    ptrs = out_ptr + rows.to(gl.int64)[:, None] * out_row + columns[None, :]
                    gl.store(ptrs, acc.to(out_desc.dtype), mask=(rows < end)[:, None] & (columns < N)[None, :])
            else:  # the group ends in the other half: nothing to compute, and the tile takes half the time
                for _ in range(0, K, DEPTH):
                    stage = turn % STAGES
                    mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                    mbarrier.arrive(empty.index(stage), count=1)
                    turn += 1
            tile += gl.num_programs(0)
        first = last
        start = end
    tma.store_wait(0)


@gluon.jit
def _store(out_desc, values, staged, row0, n0):
    tma.store_wait(0)  # what was there before has been read
    staged.store(values.to(out_desc.dtype))
    fence_async_shared()
    tma.async_copy_shared_to_global(out_desc, [row0, n0], staged)


@gluon.jit
def rows_kernel(
    pace_ptr,
    x_desc,
    w_desc,
    out_desc,
    out_ptr,
    ends_ptr,
    bias_ptr,
    scale_ptr,
    N,
    K,
    out_row,
    GROUPS: gl.constexpr,
    NK: gl.constexpr,
    BIAS: gl.constexpr,
    SCALE: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    PARTS: gl.constexpr,
    BAND: gl.constexpr,
    PACE: gl.constexpr,
    LOADER: gl.constexpr,
    CONSUMER: gl.constexpr,
    num_warps: gl.constexpr,
):
    """`out[s] = x[s] @ w[g] + scale[s] * bias[g]`; x `[S, K]`, w `[G, N, K]` or `[G, K, N]`, out `[S, N]`, all bf16.

    PACE: steps after which the loaders wait for each other, counted at `pace_ptr` (int32, zero before); 0: never.
    """
    # (Gluon's compiler takes neither starred lists nor tuples that are put together)
    a_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS // 2, DEPTH], x_desc.layout)
    b_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES] + w_desc.block_type.shape, w_desc.layout)  # noqa: RUF005
    out_smem = gl.allocate_shared_memory(out_desc.dtype, [2, ROWS // 2, COLUMNS // PARTS], out_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    # fmt: off
    gl.warp_specialize(
        [
            (_compute_rows, (
                out_desc, out_ptr, ends_ptr, bias_ptr, scale_ptr, a_smem, b_smem, out_smem, full, empty, N, K, out_row,
                gl.constexpr(0),
                GROUPS, NK, BIAS, SCALE, ROWS, COLUMNS, DEPTH, STAGES, PARTS, BAND,
            )),
            (_compute_rows, (
                out_desc, out_ptr, ends_ptr, bias_ptr, scale_ptr, a_smem, b_smem, out_smem, full, empty, N, K, out_row,
                gl.constexpr(1),
                GROUPS, NK, BIAS, SCALE, ROWS, COLUMNS, DEPTH, STAGES, PARTS, BAND,
            )),
            (_load_rows, (
                pace_ptr, x_desc, w_desc, ends_ptr, a_smem, b_smem, full, empty, N, K,
                GROUPS, NK, ROWS, COLUMNS, DEPTH, STAGES, BAND, PACE,
            )),
        ],
        [4, 1],
        [CONSUMER, LOADER],
    )
    # fmt: on

"""Grouped GEMM with SwiGLU as its epilogue, for Hopper: Gluon alone, no torch.

The roles and barriers of `hopper_kernels.py`. A stage holds two tiles of weights, gate's and up's, which are halves of
a weight seen as `[G, 2, F, K]`; a warpgroup multiplies its rows by both. A warpgroup's three results leave through one
tile of shared memory, one after the other: that makes room for another stage, which is worth more.
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

from maniple.kernels.grouped_gemm.hopper_kernels import keep_pace, leave_pace, place


@gluon.jit
def _load(
    pace_ptr,
    x_desc,
    w_desc,
    ends_ptr,
    a_smem,
    b_smem,
    full,
    empty,
    F,
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
    BYTES: gl.constexpr = 2 * HALF_BYTES + 2 * COLUMNS * DEPTH * 2
    column_tiles = gl.cdiv(F, COLUMNS)
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
            f0 = j * COLUMNS
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
                for half in gl.static_range(2):
                    b_half = b_smem.index(2 * stage + half)
                    if NK:
                        tma.async_copy_global_to_shared(w_desc, [g, half, f0, k0], loaded, b_half)
                    else:
                        tma.async_copy_global_to_shared(w_desc, [g, k0, half, f0], loaded, b_half)
                turn += 1
            tile += gl.num_programs(0)
        first = last
        start = end
    if PACE > 0:
        leave_pace(pace_ptr)


@gluon.jit
def _biased(acc, bias_ptr, columns, F, BIAS: gl.constexpr):
    if BIAS:
        acc += gl.load(bias_ptr + columns, mask=columns < F, other=0.0).to(gl.float32)[None, :]
    return acc


@gluon.jit
def _activation(gate, up, ALPHA: gl.constexpr, LIMIT: gl.constexpr, UP_OFFSET: gl.constexpr):
    if LIMIT is not None:
        gate = gl.where(gate > LIMIT, LIMIT, gate)
        up = gl.where(up > LIMIT, LIMIT, gl.where(up < -LIMIT, -LIMIT, up))
    return (up + UP_OFFSET) * gate / (1.0 + gl.exp(-ALPHA * gate))


@gluon.jit
def _leave(values, staged, desc, ptr, stride, row0, f0, end, F, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Values leave through shared memory: by the copy engine, or masked where the group ends within them."""
    staged.store(values)
    if row0 + ROWS <= end:
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [row0, f0], staged)
    else:
        LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // COLUMNS, COLUMNS // 8], [4, 1], [1, 0])
        rows = row0 + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        columns = f0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, LAYOUT))
        ptrs = ptr + rows.to(gl.int64)[:, None] * stride + columns[None, :]
        gl.store(ptrs, staged.load(LAYOUT), mask=(rows < end)[:, None] & (columns < F)[None, :])


@gluon.jit
def _compute(
    act_desc,
    gate_desc,
    up_desc,
    act_ptr,
    gate_up_ptr,
    ends_ptr,
    bias_ptr,
    probs_ptr,
    a_smem,
    b_smem,
    out_smem,
    full,
    empty,
    F,
    K,
    HALF: gl.constexpr,
    GROUPS: gl.constexpr,
    NK: gl.constexpr,
    BIAS: gl.constexpr,
    PROBS: gl.constexpr,
    KEEP: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
):
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    column_tiles = gl.cdiv(F, COLUMNS)
    tile = gl.program_id(0)
    first = 0
    start = 0
    turn = 0
    for g in range(GROUPS):
        end = gl.load(ends_ptr + g)
        row_tiles = gl.cdiv(end - start, ROWS)
        last = first + row_tiles * column_tiles
        while tile < last:
            i, j = place(tile - first, row_tiles, column_tiles, BAND)
            row0 = start + i * ROWS + HALF * (ROWS // 2)
            f0 = j * COLUMNS
            gate = gl.zeros((ROWS // 2, COLUMNS), gl.float32, MMA)
            up = gl.zeros((ROWS // 2, COLUMNS), gl.float32, MMA)
            multiplied = gl.where(row0 < end, K, 0)
            for k0 in range(0, multiplied, DEPTH):
                stage = turn % STAGES
                mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                a = a_smem.index(2 * stage + HALF)
                if NK:
                    b_gate = b_smem.index(2 * stage).reshape((COLUMNS, DEPTH)).permute((1, 0))
                    b_up = b_smem.index(2 * stage + 1).reshape((COLUMNS, DEPTH)).permute((1, 0))
                else:
                    b_gate = b_smem.index(2 * stage).reshape((DEPTH, COLUMNS))
                    b_up = b_smem.index(2 * stage + 1).reshape((DEPTH, COLUMNS))
                gate = warpgroup_mma(a, b_gate, gate, is_async=True)
                up = warpgroup_mma(a, b_up, up, is_async=True)
                gate, up = warpgroup_mma_wait(2, deps=(gate, up))  # the step before is done
                mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=k0 > 0)
                turn += 1
            gate, up = warpgroup_mma_wait(0, deps=(gate, up))
            mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=multiplied > 0)
            for _ in range(multiplied, K, DEPTH):  # the group ends in the other half: nothing to compute
                stage = turn % STAGES
                mbarrier.wait(full.index(stage), (turn // STAGES) & 1)
                mbarrier.arrive(empty.index(stage), count=1)
                turn += 1
            rows = row0 + gl.arange(0, ROWS // 2, gl.SliceLayout(1, MMA))
            columns = f0 + gl.arange(0, COLUMNS, gl.SliceLayout(0, MMA))
            bias_g = bias_ptr + gl.cast(g, gl.int64) * (2 * F) if BIAS else bias_ptr
            gate = _biased(gate, bias_g, columns, F, BIAS).to(act_desc.dtype)
            up = _biased(up, bias_g + F if BIAS else bias_g, columns, F, BIAS).to(act_desc.dtype)
            act = _activation(gate.to(gl.float32), up.to(gl.float32), ALPHA, LIMIT, UP_OFFSET)
            if PROBS:
                act *= gl.load(probs_ptr + rows, mask=rows < end, other=0.0).to(gl.float32)[:, None]
            act = act.to(act_desc.dtype)
            if row0 < end:
                staged = out_smem.index(HALF)
                tma.store_wait(0)
                _leave(act, staged, act_desc, act_ptr, F, row0, f0, end, F, ROWS // 2, COLUMNS)
                if KEEP:
                    tma.store_wait(0)
                    _leave(gate, staged, gate_desc, gate_up_ptr, 2 * F, row0, f0, end, F, ROWS // 2, COLUMNS)
                    tma.store_wait(0)
                    _leave(up, staged, up_desc, gate_up_ptr + F, 2 * F, row0, f0, end, F, ROWS // 2, COLUMNS)
            tile += gl.num_programs(0)
        first = last
        start = end
    tma.store_wait(0)


@gluon.jit
def swiglu_rows_kernel(
    pace_ptr,
    x_desc,
    w_desc,
    act_desc,
    gate_desc,
    up_desc,
    act_ptr,
    gate_up_ptr,
    ends_ptr,
    bias_ptr,
    probs_ptr,
    F,
    K,
    GROUPS: gl.constexpr,
    NK: gl.constexpr,
    BIAS: gl.constexpr,
    PROBS: gl.constexpr,
    KEEP: gl.constexpr,
    ALPHA: gl.constexpr,
    LIMIT: gl.constexpr,
    UP_OFFSET: gl.constexpr,
    ROWS: gl.constexpr,
    COLUMNS: gl.constexpr,
    DEPTH: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    PACE: gl.constexpr,
    LOADER: gl.constexpr,
    CONSUMER: gl.constexpr,
    num_warps: gl.constexpr,
):
    """As the portable `swiglu_rows_kernel`, stacked; x `[S, K]`, act `[S, F]`, gate_up `[S, 2F]`, all bf16.

    w_desc is of `[G, 2, F, K]` or `[G, K, 2, F]`; gate_desc and up_desc are of gate_up's halves, `[S, F]` each.
    PACE and pace_ptr are those of `hopper_kernels.rows_kernel`.
    """
    a_smem = gl.allocate_shared_memory(x_desc.dtype, [2 * STAGES, ROWS // 2, DEPTH], x_desc.layout)
    b_smem = gl.allocate_shared_memory(w_desc.dtype, [2 * STAGES] + w_desc.block_type.shape, w_desc.layout)  # noqa: RUF005
    out_smem = gl.allocate_shared_memory(act_desc.dtype, [2, ROWS // 2, COLUMNS], act_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    # fmt: off
    gl.warp_specialize(
        [
            (_compute, (
                act_desc, gate_desc, up_desc, act_ptr, gate_up_ptr, ends_ptr, bias_ptr, probs_ptr,
                a_smem, b_smem, out_smem, full, empty, F, K,
                gl.constexpr(0),
                GROUPS, NK, BIAS, PROBS, KEEP, ALPHA, LIMIT, UP_OFFSET, ROWS, COLUMNS, DEPTH, STAGES, BAND,
            )),
            (_compute, (
                act_desc, gate_desc, up_desc, act_ptr, gate_up_ptr, ends_ptr, bias_ptr, probs_ptr,
                a_smem, b_smem, out_smem, full, empty, F, K,
                gl.constexpr(1),
                GROUPS, NK, BIAS, PROBS, KEEP, ALPHA, LIMIT, UP_OFFSET, ROWS, COLUMNS, DEPTH, STAGES, BAND,
            )),
            (_load, (
                pace_ptr, x_desc, w_desc, ends_ptr, a_smem, b_smem, full, empty, F, K,
                GROUPS, NK, ROWS, COLUMNS, DEPTH, STAGES, BAND, PACE,
            )),
        ],
        [4, 1],
        [CONSUMER, LOADER],
    )
    # fmt: on

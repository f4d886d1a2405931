"""Adding what registers hold to an fp32 tensor in memory, on Hopper: Gluon alone, no torch.

What is there is asked into the L2 cache when a tile begins (`fetch_tile`), read when its sum is nearly done
(`old_block`), and written back through the copy engine (`write_block`). To let the L2 cache add (the copy engine's
reductions) reads nothing, but it takes no more than 1.2 TB/s of fp32 there, a third of what the memory does. Each
element is added to once, by one program, so that the result has the same bits every time.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

COLUMNS = gl.constexpr(64)  # that are staged at once: 16 KB for 64 rows


@gluon.jit
def halves(values, WIDTH: gl.constexpr):
    """The left and the right WIDTH / 2 columns of `[64, WIDTH]`."""
    return values.reshape((64, 2, WIDTH // 2)).permute((0, 2, 1)).split()


@gluon.jit
def fetch_tile(out_ptr, g, a0, b0, A, B, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Asks for `[g, a0 : a0 + ROWS, b0 : b0 + COLUMNS]` of fp32 `[G, A, B]`, by one warp, a line of 128 bytes a lane."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    LINES: gl.constexpr = COLUMNS // 32  # of a row
    lanes = gl.arange(0, 32, LANES)
    columns = gl.minimum(b0 + lanes % LINES * 32, B - 1)  # what lies past the edge asks for the edge
    for start in range(0, ROWS, 32 // LINES):
        rows = gl.minimum(a0 + start + lanes // LINES, A - 1)
        ptrs = out_ptr + (gl.cast(g, gl.int64) * A + rows) * B + columns
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [ptrs], dtype=gl.int32, is_pure=False, pack=1
        )


@gluon.jit
def old_block(out_ptr, g, a0, b0, A, B):
    """fp32 `[64, 64]` from `[g, a0:, b0:]`; zero past A and B."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    rows = a0 + gl.arange(0, 64, gl.SliceLayout(1, MMA))
    columns = b0 + gl.arange(0, 64, gl.SliceLayout(0, MMA))
    ptrs = out_ptr + ((gl.cast(g, gl.int64) * A + rows) * B)[:, None] + columns[None, :]
    return gl.load(ptrs, mask=(rows < A)[:, None] & (columns < B)[None, :], other=0.0)


@gluon.jit
def write_block(desc, values, old, staged, g, a0, b0, PENDING: gl.constexpr):
    """Writes the sum of two fp32 `[64, 64]` to `[g, a0:, b0:]`. `staged` is free when all but PENDING earlier ones have
    been read."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tma.store_wait(PENDING)
    staged.store((gl.convert_layout(values, MMA) + old).reshape((1, 64, 64)))
    fence_async_shared()
    tma.async_copy_shared_to_global(desc, [g, a0, b0], staged)

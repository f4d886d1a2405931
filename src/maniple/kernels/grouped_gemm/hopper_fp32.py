"""Writing fp32 from registers to a tensor in memory, or adding it there, by Hopper's copy engine: Gluon, no torch.

A sum is formed in the L2 cache, so that nobody waits for what was there, and a warpgroup goes on as soon as shared
memory has its numbers. Where each element is added to once, by one program, the result has the same bits every time.
"""

from __future__ import annotations

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

COLUMNS = gl.constexpr(64)  # that are staged at once: 16 KB for 64 rows


@builtin
def async_add_shared_to_global(tensor_desc, coord, src, _semantic=None):
    """As `tma.async_copy_shared_to_global`, but adds. Triton 3.6 has the operation, and Gluon does not name it yet."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def halves(values, WIDTH: gl.constexpr):
    """The left and the right WIDTH / 2 columns of `[64, WIDTH]`."""
    return values.reshape((64, 2, WIDTH // 2)).permute((0, 2, 1)).split()


@gluon.jit
def put_block(desc, values, staged, g, a0, b0, ADD: gl.constexpr, PENDING: gl.constexpr):
    """Writes fp32 `[64, 64]` to `[g, a0:, b0:]`, or adds it. `staged` is free once all but PENDING have read theirs."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    tma.store_wait(PENDING)
    staged.store(gl.convert_layout(values, MMA).reshape((1, 64, 64)))
    fence_async_shared()
    if ADD:
        async_add_shared_to_global(desc, [g, a0, b0], staged)
    else:
        tma.async_copy_shared_to_global(desc, [g, a0, b0], staged)

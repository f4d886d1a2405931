"""AdamW over flat shards in portable Triton, one pass over memory. As `reference.py`'s functions."""

from __future__ import annotations

import torch
import triton

from maniple.kernels import chips
from maniple.kernels.adamw import launch
from maniple.kernels.adamw.reference import Shard
from maniple.kernels.adamw.triton_kernels import update_kernel


def update(shard: Shard, scalars: launch.Scalars, step: int, grad_scale: torch.Tensor | float | None) -> None:
    """As the reference's. The host waits for nothing."""
    n = shard.main.numel()
    if not n:
        return
    block = launch.block(chips.target(shard.main))
    on_device = isinstance(grad_scale, torch.Tensor)
    update_kernel[(triton.cdiv(n, block.elements),)](
        shard.grad,
        shard.main,
        shard.exp_avg,
        shard.exp_avg_sq,
        shard.model,
        grad_scale if on_device else None,
        n,
        shard.first,
        launch.key(shard.seed, step),
        1.0 if on_device or grad_scale is None else float(grad_scale),
        scalars.beta1,
        scalars.rest1,
        scalars.beta2,
        scalars.rest2,
        scalars.decay,
        scalars.step_size,
        scalars.root,
        scalars.epsilon,
        BLOCK=block.elements,
        num_warps=block.warps,
    )

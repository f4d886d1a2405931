"""AdamW over flat shards, each of its tensors in fp32 or bf16. `adamw_` is the public function.

An implementation is an object with the function of `reference.py`: `update`.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from maniple.kernels import chips, registry
from maniple.kernels.adamw import launch, reference
from maniple.kernels.adamw.reference import Shard

__all__ = ["Shard", "adamw_"]

_triton = registry.LazyModule("maniple.kernels.adamw.triton")
registry.register("adamw", "reference", {"bf16"}, registry.ANY_DEVICE, reference)
registry.register("adamw", "triton", {"bf16"}, {"cuda"}, _triton, preference=1, reason_unavailable=chips.no_triton)
_DTYPES = (torch.float32, torch.bfloat16)


@torch.no_grad()
def adamw_(
    shards: Iterable[Shard],
    *,
    step: int,
    learning_rate: float,
    beta1: float = 0.9,
    beta2: float = 0.95,
    epsilon: float = 1e-8,
    weight_decay: float = 0.0,
    grad_scale: torch.Tensor | float | None = None,
    kernels: str | None = None,
) -> None:
    """Update number `step` (from 1) of every shard, in place: its main parameter, moments and model copy.

    AdamW with decoupled weight decay and bias correction; `reference.update` has the formula and the rounding. A shard
    is read and written once, in fp32 inside, and nothing of its size is allocated. grad_scale multiplies gradients: a
    number, or one fp32 number on the shards' device, which the host does not wait for. The same inputs, with the same
    seed, step and element numbers, give the same bits. `kernels` names an implementation. Raises ValueError for tensors
    of other dtypes, sizes or layouts.
    """
    if step < 1:
        raise ValueError(f"adamw_ counts updates from 1, not {step}")
    if isinstance(grad_scale, torch.Tensor) and (grad_scale.numel() != 1 or grad_scale.dtype != torch.float32):
        raise ValueError(f"grad_scale is one fp32 number, not {grad_scale.dtype} {list(grad_scale.shape)}")
    scalars = launch.scalars(learning_rate, beta1, beta2, epsilon, weight_decay, step)
    for shard in shards:
        _check(shard)
        if not shard.main.is_meta:  # which has no values to update
            registry.use("adamw", "bf16", shard.main.device.type, kernels).update(shard, scalars, step, grad_scale)


def _check(shard: Shard) -> None:
    tensors = {name: getattr(shard, name) for name in ("grad", "main", "exp_avg", "exp_avg_sq", "model")}
    if shard.model is None:
        del tensors["model"]
    elif shard.model.dtype != torch.bfloat16:
        raise ValueError(f"a shard's model copy is bf16, not {shard.model.dtype}")
    for name, tensor in tensors.items():
        if tensor.dtype not in _DTYPES:
            raise ValueError(f"a shard's {name} is fp32 or bf16, not {tensor.dtype}")
        if tensor.numel() != shard.main.numel() or not tensor.is_contiguous():
            raise ValueError(
                f"a shard's {name} is contiguous and as large as its main parameter, {shard.main.numel()}, not "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )

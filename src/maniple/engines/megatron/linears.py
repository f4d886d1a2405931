"""Megatron-Core's column- and row-parallel linear layers in a low-precision recipe.

Upstream's layers keep their weights, their checkpoints and what they do around the product; the product itself is
theirs to choose through `_forward_impl` (tensor_parallel/layers.py), which takes the place of a
`LowPrecisionProduct` here. Everything else that they hold stays bf16.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from maniple.kernels.linear import choose, quantized_linear
from maniple.kernels.quantize import QuantizedWeight

LINEARS = (ColumnParallelLinear, RowParallelLinear)


class LowPrecisionProduct:
    """What a linear layer multiplies with: called as upstream's `linear_with_grad_accumulation_and_async_allreduce`.

    Under sequence parallelism the input is gathered in bf16 before it is quantized; backward keeps the quantized whole,
    transposed, in float8, where upstream keeps its part in bf16 and gathers it again.
    """

    def __init__(self, recipe: str, dtype: torch.dtype) -> None:
        self.recipe, self.dtype = recipe, dtype
        self.cache = QuantizedWeight(recipe, dtype=dtype)
        self.ran: str | None = None  # the recipe of the last forward pass

    def choose(self, weight: torch.Tensor) -> str:
        """What multiplies this weight, in words. Raises UserError if nothing can."""
        name, inner = choose(weight, self.recipe, dtype=self.dtype)
        return name if inner is None else f"{name} {inner}"

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        gradient_accumulation_fusion: bool,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup | None = None,
        **unused: Any,
    ) -> torch.Tensor:
        """`[S / TP, B, K]` with sequence parallelism, else `[S, B, K]`, to `[S, B, N]`."""
        exchange: Any = None
        if sequence_parallel:
            exchange = Sequence(tp_group)
        elif allreduce_dgrad:
            exchange = Copies(tp_group)
        self.ran = self.recipe
        return quantized_linear(
            input,
            weight,
            recipe=self.recipe,
            bias_N=bias,
            fuse_wgrad_accumulation=hasattr(weight, "main_grad"),
            weight_cache=self.cache,
            dtype=self.dtype,
            exchange=exchange,
        )


@dataclass(frozen=True)
class Sequence:
    """Ranks hold parts of the sequence, its first dimension: gathered before, and reduced and scattered after."""

    group: dist.ProcessGroup

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        whole = x.new_empty(x.shape[0] * self.group.size(), *x.shape[1:])
        dist.all_gather_into_tensor(whole, x.contiguous(), group=self.group)
        return whole

    def reduce(self, grad: torch.Tensor) -> Callable[[], torch.Tensor]:
        part = grad.new_empty(grad.shape[0] // self.group.size(), *grad.shape[1:])
        handle = dist.reduce_scatter_tensor(part, grad.contiguous(), group=self.group, async_op=True)
        return _when_done(handle, part)


@dataclass(frozen=True)
class Copies:
    """Each rank holds the whole, and has the gradient of its own columns' use of it."""

    group: dist.ProcessGroup

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def reduce(self, grad: torch.Tensor) -> Callable[[], torch.Tensor]:
        return _when_done(dist.all_reduce(grad, group=self.group, async_op=True), grad)


def _when_done(handle: Any, result: torch.Tensor) -> Callable[[], torch.Tensor]:
    def received() -> torch.Tensor:
        handle.wait()
        return result

    return received

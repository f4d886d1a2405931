"""Losses straight from the last hidden states (`train.loss: fused`, `fused_kept`), by Megatron-Core's output layer.

The layer is called as ever, so that what waits for its weights does so (DDP's hook before a forward pass), and takes
what is here in the place of its product (`_forward_impl`, tensor_parallel/layers.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel.layers import ColumnParallelLinear

from maniple.engines.megatron.linears import Copies, Sequence
from maniple.kernels.cross_entropy import linear_cross_entropy


def losses_of(
    layer: ColumnParallelLinear,
    hidden_SBD: torch.Tensor,
    labels_BS: torch.Tensor,
    weight_VD: torch.Tensor | None,
    *,
    keep_logits: bool = False,
) -> torch.Tensor:
    """fp32 `[B, S]`. hidden: `[S / TP, B, D]` under sequence parallelism, else `[S, B, D]`. weight: the embedding's,
    where the model has one for both; its gradient then comes in two parts, and is left to autograd to add up."""
    product, former = _Losses(labels_BS.transpose(0, 1), weight_VD is None, keep_logits), layer._forward_impl
    layer._forward_impl = product
    try:
        losses_SB, _ = layer(hidden_SBD, weight=weight_VD, runtime_gather_output=False)
    finally:
        layer._forward_impl = former
    return losses_SB.transpose(0, 1).contiguous()


@dataclass(frozen=True)
class _Losses:
    """Called as upstream's `linear_with_grad_accumulation_and_async_allreduce`: `[S, B]` losses in place of logits."""

    labels_SB: torch.Tensor
    fuse: bool
    keep_logits: bool

    def __call__(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        sequence_parallel: bool,
        tp_group: dist.ProcessGroup,
        **unused: Any,
    ) -> torch.Tensor:
        assert bias is None
        cut = tp_group.size() > 1
        return linear_cross_entropy(
            input,
            weight,
            self.labels_SB.contiguous(),
            first=tp_group.rank() * weight.shape[0],
            exchange=_Cut(tp_group, (Sequence if sequence_parallel else Copies)(tp_group)) if cut else None,
            fuse_wgrad_accumulation=self.fuse and hasattr(weight, "main_grad"),
            keep_logits=self.keep_logits,
        )


@dataclass(frozen=True)
class _Cut:
    """The vocabulary is cut over ranks, and the sequence may be."""

    group: dist.ProcessGroup
    hidden: Sequence | Copies

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden.gather(x)

    def reduce(self, grad: torch.Tensor):
        return self.hidden.reduce(grad)

    def combine(self, lse_T: torch.Tensor, target_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        most_T = lse_T.clone()
        dist.all_reduce(most_T, op=dist.ReduceOp.MAX, group=self.group)
        sums_2T = torch.stack([(lse_T - most_T).exp(), target_T])
        dist.all_reduce(sums_2T, group=self.group)
        return most_T + sums_2T[0].log(), sums_2T[1]

"""What exchange and experts of one MoE layer take, with an even load and with the worst: all tokens on one rank.

A rank with experts of its own receives as many rows as the other ranks' tokens choose them. Evenly loaded that is
T * K; at worst every token of all ranks chooses as many of its experts as it may: T * min(K, G) from each.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maniple.engines.megatron.dry_run.memory import StorageMeter
from maniple.engines.megatron.moe import ManipleMoELayer
from maniple.moe.dispatch import AllToAllDispatcher, Dispatcher


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer and micro-batch. rows: what the experts compute; kept: what backward needs, by the end of forward;
    peak: at most, in forward or backward, with the gradients of weights and input. Inputs are not counted."""

    rows: int
    kept: int
    peak: int


def layer_bytes(
    dispatcher: Dispatcher, experts: torch.nn.Module, x_TD: torch.Tensor, ids_TK: torch.Tensor, probs_TK: torch.Tensor
) -> LayerBytes:
    """Runs dispatch, experts and combine forward and backward and counts, on any device (see `memory.StorageMeter`).

    x_TD and probs_TK need gradients. Collective over the ranks of the dispatcher.
    """
    with StorageMeter() as meter:
        rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, ids_TK, probs_TK)
        rows, probs = dispatcher.token_dispatch(rows, probs, handle)
        rows, probs, ends_G = dispatcher.dispatch_postprocess(rows, probs, handle)
        computed = rows.shape[0]
        rows, _ = experts(rows, ends_G, probs, splits_G=getattr(handle, "splits_G", None))
        rows = dispatcher.token_combine(dispatcher.combine_preprocess(rows, handle), handle)
        out_TD = dispatcher.combine_postprocess(rows, handle)
        del rows, probs, handle, ends_G
        kept = meter.live
        grad_TD = torch.empty_like(out_TD)
        # a weight's gradient goes to its `main_grad`
        torch.autograd.grad(out_TD, [x_TD, probs_TK, *experts.parameters()], grad_TD, allow_unused=True)
        return LayerBytes(computed, kept, meter.peak)


def even_and_worst(chunks: list, tokens: int) -> tuple[LayerBytes, LayerBytes] | None:
    """Of the first MoE layer in `chunks`, with `tokens` on each rank; None if there is none or no exchange.

    In a dry run (`meta.stand_in`): the layers' dispatchers take static splits.
    """
    layers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, ManipleMoELayer)]
    if not layers or layers[0].config.expert_model_parallel_size == 1:
        return None
    layer, config = layers[0], layers[0].config
    experts: torch.nn.Module = layer.experts
    even = layer.token_dispatcher.dispatcher
    assert isinstance(even, AllToAllDispatcher)
    worst = AllToAllDispatcher(
        even.num_experts, even.ep_group, etp_group=even.etp_group, static_splits="here", kernels=even.kernels
    )
    x_TD = torch.empty(tokens, config.hidden_size, dtype=config.params_dtype, requires_grad=True)
    ids_TK = torch.empty(tokens, config.moe_router_topk, dtype=torch.int64)
    probs_TK = torch.empty(tokens, config.moe_router_topk, dtype=torch.float32, requires_grad=True)
    with torch.enable_grad():
        return layer_bytes(even, experts, x_TD, ids_TK, probs_TK), layer_bytes(worst, experts, x_TD, ids_TK, probs_TK)

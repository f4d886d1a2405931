"""The whole mixture-of-experts layer as one function, without an engine: route, dispatch, experts, combine."""

from __future__ import annotations

from contextlib import nullcontext

import torch

from maniple.kernels.forgotten import forgetting
from maniple.kernels.routing import RouterSpec, Routing, route, router_logits
from maniple.moe.dispatch import Dispatcher
from maniple.moe.experts import ExpertActivation, expert_mlp


def moe_forward(
    x_TD: torch.Tensor,
    router_ED: torch.Tensor,
    w13_GFD: torch.Tensor,
    w2_GDF: torch.Tensor,
    spec: RouterSpec,
    dispatcher: Dispatcher,
    *,
    router_bias_E: torch.Tensor | None = None,
    expert_bias_E: torch.Tensor | None = None,
    b13_GF: torch.Tensor | None = None,
    b2_GD: torch.Tensor | None = None,
    activation: ExpertActivation | None = None,
    kernels: str | None = None,
) -> tuple[torch.Tensor, Routing]:
    """`[T, D]` in x's dtype, and the routing, from which losses and statistics are taken.

    router_ED: `[E, D]`, with its linear bias `router_bias_E`; expert_bias_E: the fp32 balancing bias of selection. The
    other arguments are those of `expert_mlp`; w13 and w2 hold the experts of this rank. With `dispatcher.lets_go` (a
    `LocalDispatcher`'s) backward needs less memory at most: the experts' copy of the rows is gone once the gradient of
    w13 is made, and a second backward pass of the same graph makes it again. Hooks of saved tensors that are set
    outside, checkpointing among them, then do not see what the experts save.
    """
    routing = route(router_logits(x_TD, router_ED, router_bias_E), spec, expert_bias_E, kernels=kernels)
    with forgetting() if getattr(dispatcher, "lets_go", False) else nullcontext():
        rows, probs, handle = dispatcher.dispatch_preprocess(x_TD, routing.ids_TK, routing.probs_TK)
        rows, probs = dispatcher.token_dispatch(rows, probs, handle)
        rows_SD, probs_S, ends_G = dispatcher.dispatch_postprocess(rows, probs, handle)
        rows_SD = expert_mlp(
            rows_SD,
            probs_S,
            ends_G,
            w13_GFD,
            w2_GDF,
            b13_GF=b13_GF,
            b2_GD=b2_GD,
            activation=activation,
            kernels=kernels,
        )
    rows = dispatcher.combine_preprocess(rows_SD, handle)
    rows = dispatcher.token_combine(rows, handle)
    return dispatcher.combine_postprocess(rows, handle), routing

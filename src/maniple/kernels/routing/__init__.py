"""Routing: which experts a token goes to, with which weight. The exact semantic is `reference.route`'s docstring.

An implementation is a function with the signature of `reference.route`.
"""

from __future__ import annotations

import torch

from maniple.kernels import chips, registry
from maniple.kernels.routing import reference
from maniple.kernels.routing.logits import router_logits
from maniple.kernels.routing.reference import RouterSpec, Routing, bias_update, z_loss

__all__ = ["RouterSpec", "Routing", "bias_update", "route", "router_logits", "z_loss"]

_triton = registry.LazyModule("maniple.kernels.routing.triton")


def _route_triton(*arguments) -> Routing:
    return _triton.route(*arguments)


registry.register("routing", "reference", {"bf16"}, registry.ANY_DEVICE, reference.route)
registry.register(
    "routing", "triton", {"bf16"}, {"cuda"}, _route_triton, preference=1, reason_unavailable=chips.no_triton
)


def route(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    bias_E: torch.Tensor | None = None,
    *,
    ids_TK: torch.Tensor | None = None,
    kernels: str | None = None,
) -> Routing:
    """Chooses `spec.topk` experts for each token, or takes those of `ids_TK`: see `reference.route`. `kernels` names an
    implementation.

    Raises ValueError where logits or bias do not have `spec.num_experts` columns, or ids are not int64 `[T, topk]`.
    """
    if logits_TE.dim() != 2 or logits_TE.shape[1] != spec.num_experts:
        raise ValueError(f"route needs logits [T, {spec.num_experts}], not {list(logits_TE.shape)}")
    if bias_E is not None and (bias_E.shape != (spec.num_experts,) or bias_E.dtype != torch.float32):
        raise ValueError(f"the expert bias is fp32 [{spec.num_experts}], not {bias_E.dtype} {list(bias_E.shape)}")
    if ids_TK is not None and (ids_TK.shape != (logits_TE.shape[0], spec.topk) or ids_TK.dtype != torch.int64):
        raise ValueError(f"ids are int64 [{logits_TE.shape[0]}, {spec.topk}], not {ids_TK.dtype} {list(ids_TK.shape)}")
    return registry.use("routing", "bf16", logits_TE.device.type, kernels)(logits_TE, spec, bias_E, ids_TK)

"""Routing in portable Triton: one kernel a direction.

`route` has the interface of `reference.route`. The host waits for nothing; of what it computes, backward keeps logits
and ids. Balance and z-losses stay in torch, and take `scores_TE` and the counts from what this returns. What looks at
operators sees `maniple::route` and `maniple::route_backward`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
import triton

from maniple.kernels import chips, custom_ops
from maniple.kernels.routing import launch
from maniple.kernels.routing.reference import RouterSpec, Routing
from maniple.kernels.routing.triton_kernels import backward_kernel, forward_kernel


@dataclass(frozen=True)
class CountedRouting(Routing):
    """A routing whose choices were counted as they were made."""

    counts_E: torch.Tensor  # int64: tokens that chose each expert

    def sequence_counts(self, sequences: int, valid_T: torch.Tensor | None = None) -> torch.Tensor:
        """As `Routing.sequence_counts`: a tensor of its own each time, which the caller may write to."""
        if sequences == 1 and valid_T is None:
            return self.counts_E.clone()[None]
        return super().sequence_counts(sequences, valid_T)


def route(
    logits_TE: torch.Tensor,
    spec: RouterSpec,
    bias_E: torch.Tensor | None = None,
    ids_TK: torch.Tensor | None = None,
) -> CountedRouting:
    """As the reference's. Given ids outside [0, E) have weight 0 and are counted nowhere."""
    call = torch.ops.maniple.route if custom_ops.named(logits_TE) else _Route.apply
    chosen_TK, probs_TK, scores_TE, counts_E = call(logits_TE, bias_E, ids_TK, *dataclasses.astuple(spec))
    return CountedRouting(chosen_TK if ids_TK is None else ids_TK, probs_TK, scores_TE, counts_E)


def forward(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, ids_TK: torch.Tensor | None, *settings: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operator `maniple::route`: ids (`[0]` where they are given), probs, scores, counts; RouterSpec's settings."""
    spec = RouterSpec(*settings)
    chosen_TK, probs_TK, scores_TE, counts_E = _empty(logits_TE, bias_E, ids_TK, *settings)
    counts_E.zero_()
    tokens = logits_TE.shape[0]
    if tokens:
        logits_TE = _rows_contiguous(logits_TE)
        constants = launch.forward_constants(chips.target(logits_TE), spec, given=ids_TK is not None)
        forward_kernel[(triton.cdiv(tokens, constants["ROWS"]),)](
            logits_TE,
            None if bias_E is None else bias_E.contiguous(),
            None if ids_TK is None else ids_TK.contiguous(),
            None if ids_TK is not None else chosen_TK,
            probs_TK,
            scores_TE,
            counts_E,
            tokens,
            logits_TE.stride(0),
            spec.route_scale,
            **constants,
        )
    return chosen_TK, probs_TK, scores_TE, counts_E


def backward(
    grad_probs_TK: torch.Tensor | None,
    grad_scores_TE: torch.Tensor | None,
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    *settings: Any,
) -> torch.Tensor:
    """The operator `maniple::route_backward`: the gradient of logits, in their dtype."""
    spec = RouterSpec(*settings)
    grad_TE = torch.empty_like(logits_TE, memory_format=torch.contiguous_format)
    tokens = logits_TE.shape[0]
    if tokens:
        logits_TE = _rows_contiguous(logits_TE)
        constants = launch.backward_constants(chips.target(logits_TE), spec)
        backward_kernel[(triton.cdiv(tokens, constants["ROWS"]),)](
            logits_TE,
            ids_TK.contiguous(),
            None if grad_probs_TK is None else grad_probs_TK.contiguous(),
            None if grad_scores_TE is None else grad_scores_TE.contiguous(),
            grad_TE,
            tokens,
            logits_TE.stride(0),
            spec.route_scale,
            **constants,
        )
    return grad_TE


def _empty(logits_TE, bias_E, ids_TK, num_experts, topk, *settings):
    """What the operator returns, without values."""
    tokens = logits_TE.shape[0]
    return (
        logits_TE.new_empty((tokens, topk) if ids_TK is None else (0,), dtype=torch.int64),
        logits_TE.new_empty((tokens, topk), dtype=torch.float32),
        logits_TE.new_empty((tokens, num_experts), dtype=torch.float32),
        logits_TE.new_empty(num_experts, dtype=torch.int64),
    )


def _rows_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(1) == 1 else tensor.contiguous()


def _save(ctx, inputs, output) -> None:
    logits_TE, _, ids_TK, *ctx.settings = inputs
    ctx.save_for_backward(logits_TE, output[0] if ids_TK is None else ids_TK)
    ctx.set_materialize_grads(False)


def _gradients(ctx, grad_probs_TK, grad_scores_TE, call):
    grad_TE = None
    if grad_probs_TK is not None or grad_scores_TE is not None:
        grad_TE = call(grad_probs_TK, grad_scores_TE, *ctx.saved_tensors, *ctx.settings)
    return grad_TE, None, None, *(None for _ in ctx.settings)


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        output = forward(*inputs)
        ctx.mark_non_differentiable(output[0], output[3])
        _save(ctx, inputs, output)
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, _ids, grad_probs_TK, grad_scores_TE, _counts):
        return _gradients(ctx, grad_probs_TK, grad_scores_TE, backward)


_SPEC = (
    "int num_experts, int topk, str score, bool score_before_topk, bool renormalize, int num_groups, int group_topk, "
    "str group_score, float route_scale"
)
custom_ops.define(
    f"route(Tensor logits, Tensor? bias, Tensor? ids, {_SPEC}) -> (Tensor, Tensor, Tensor, Tensor)", forward, _empty
)
custom_ops.define(
    f"route_backward(Tensor? grad_probs, Tensor? grad_scores, Tensor logits, Tensor ids, {_SPEC}) -> Tensor",
    backward,
    lambda grad_probs_TK, grad_scores_TE, logits_TE, *rest: torch.empty_like(
        logits_TE, memory_format=torch.contiguous_format
    ),
)
custom_ops.differentiate(
    "route",
    lambda ctx, _ids, grad_probs_TK, grad_scores_TE, _counts: _gradients(
        ctx, grad_probs_TK, grad_scores_TE, torch.ops.maniple.route_backward
    ),
    _save,
)

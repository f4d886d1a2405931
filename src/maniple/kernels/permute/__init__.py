"""Permutation of tokens into expert order and back. `permute` and `unpermute` are each other's adjoint.

An implementation is an object with the functions of `reference.py`: `sort_by_expert`, `gather`, `scatter_sum`.
"""

from __future__ import annotations

import torch

from maniple.kernels import chips, registry
from maniple.kernels.permute import reference
from maniple.kernels.permute.reference import Permutation

__all__ = ["Permutation", "permute", "permute_probs", "sort_by_expert", "unpermute"]

_triton = registry.LazyModule("maniple.kernels.permute.triton")
registry.register("permute", "reference", {"bf16"}, registry.ANY_DEVICE, reference)
registry.register("permute", "triton", {"bf16"}, {"cuda"}, _triton, preference=1, reason_unavailable=chips.no_triton)


def sort_by_expert(ids_TK: torch.Tensor, num_experts: int, *, kernels: str | None = None) -> Permutation:
    """Where each chosen (token, k) goes when all are sorted by expert, those of an expert in token order.

    ids_TK: integers `[T, K]`; one outside [0, num_experts) means "not here": it gets a slot past `ends_E[-1]`. The host
    does not wait for the device. Raises ValueError if ids are not integers `[T, K]`.
    """
    if ids_TK.dim() != 2 or ids_TK.is_floating_point():
        raise ValueError(f"sort_by_expert needs integer ids [T, K], not {ids_TK.dtype} {list(ids_TK.shape)}")
    return registry.use("permute", "bf16", ids_TK.device.type, kernels).sort_by_expert(ids_TK, num_experts)


def permute(
    x_TD: torch.Tensor, permutation: Permutation, *, slots: int | None = None, kernels: str | None = None
) -> torch.Tensor:
    """Rows in expert order, `[S, D]`: S is T * K, or `slots`, the first ones alone.

    Rows past `ends_E[-1]` are undefined. The gradient sums a token's rows in fp32, k rising, and never reads past
    `ends_E[-1]` or S.
    """
    implementation = registry.use("permute", "bf16", x_TD.device.type, kernels)
    slots = permutation.order_S.shape[0] if slots is None else slots
    return _Permute.apply(x_TD, permutation, slots, implementation)


def unpermute(rows_SD: torch.Tensor, permutation: Permutation, *, kernels: str | None = None) -> torch.Tensor:
    """Sum of each token's rows, `[T, D]`, unweighted: fp32, k rising, rounded once to the dtype of the rows.

    Rows past `ends_E[-1]` are never read, and where there are fewer those that are missing add nothing. The gradient's
    rows past it are undefined.
    """
    return _Unpermute.apply(rows_SD, permutation, registry.use("permute", "bf16", rows_SD.device.type, kernels))


def permute_probs(
    probs_TK: torch.Tensor, permutation: Permutation, *, slots: int | None = None, kernels: str | None = None
) -> torch.Tensor:
    """The weight of each slot's row, `[S]`, in the order of `permute`."""
    return permute(probs_TK.reshape(-1, 1), permutation.flat(), slots=slots, kernels=kernels).squeeze(1)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, permutation, slots, implementation):
        ctx.settings = permutation, implementation
        return implementation.gather(x_TD, permutation, slots)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SD):
        permutation, implementation = ctx.settings
        return implementation.scatter_sum(grad_SD, permutation), None, None, None


class _Unpermute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_SD, permutation, implementation):
        ctx.settings = permutation, implementation, rows_SD.shape[0]
        return implementation.scatter_sum(rows_SD, permutation)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TD):
        permutation, implementation, slots = ctx.settings
        return implementation.gather(grad_TD, permutation, slots), None, None

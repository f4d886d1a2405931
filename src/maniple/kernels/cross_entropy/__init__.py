"""The loss of a language model from its last hidden states: head and cross-entropy in one, a chunk of tokens at a time.

Logits exist for one chunk at once, in the dtype of the hidden states, and never in fp32; backward computes them again,
unless they are kept. What is kept for it otherwise are the hidden states and two numbers a token. An implementation is
an object with the functions of `reference.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch

from maniple.kernels import chips, custom_ops, main_grad, registry
from maniple.kernels.cross_entropy import reference

__all__ = ["Exchange", "linear_cross_entropy"]

_CHUNK_BYTES = 512 << 20  # of logits
_CHUNK_STEP = 128  # tokens
_triton = registry.LazyModule("maniple.kernels.cross_entropy.triton")
registry.register("cross_entropy", "reference", {"bf16"}, registry.ANY_DEVICE, reference)
registry.register(
    "cross_entropy", "triton", {"bf16"}, {"cuda"}, _triton, preference=1, reason_unavailable=chips.no_triton
)


class Exchange(Protocol):
    """What ranks send each other where the hidden states, the vocabulary or both are cut over them."""

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """The whole hidden states from this rank's part."""
        ...

    def combine(self, lse_T: torch.Tensor, target_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-sum-exp of all ranks' logits from each rank's, and the sum of the labels' logits."""
        ...

    def reduce(self, grad: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Starts to sum the gradients of the whole; what it returns is called later, for that of this rank's part."""
        ...


def linear_cross_entropy(
    hidden: torch.Tensor,
    w_VD: torch.Tensor,
    labels: torch.Tensor,
    *,
    first: int = 0,
    exchange: Exchange | None = None,
    fuse_wgrad_accumulation: bool = False,
    keep_logits: bool = False,
    chunk_tokens: int | None = None,
    kernels: str | None = None,
) -> torch.Tensor:
    """`logsumexp(hidden @ wᵀ) - (hidden @ wᵀ)[label]`, fp32, in the shape of `labels`.

    hidden: `[..., D]` bf16 or fp32, this rank's part if there is an `exchange`. w_VD: `[V, D]`, rows `first` to
    `first + V` of the vocabulary, hidden's dtype. labels: int64, of all tokens; one of another rank's rows is found
    there, and one of no rank's gives the log-sum-exp alone. Logits are rounded to hidden's dtype, as a head of its own
    would; sums are fp32. chunk_tokens: as many at a time; None: those of 512 MiB of logits.

    keep_logits: all of them are made at once and kept for backward, which puts their gradient in their place: one
    product less, for `[tokens, V]` in hidden's dtype. A second backward pass of one graph makes them again.

    fuse_wgrad_accumulation: backward adds the weight's gradient to `w_VD.main_grad` (fp32) and sets
    `w_VD.grad_added_to_main_grad` (`maniple.kernels.main_grad.added`). Raises ValueError for operands that do not
    agree.
    """
    if w_VD.dim() != 2 or not hidden.dim() or hidden.shape[-1] != w_VD.shape[1] or hidden.dtype != w_VD.dtype:
        raise ValueError(
            f"linear_cross_entropy needs hidden [..., D] and w [V, D] of one dtype, not {hidden.dtype} "
            f"{list(hidden.shape)} and {w_VD.dtype} {list(w_VD.shape)}"
        )
    if labels.dtype != torch.int64 or (exchange is None and labels.shape != hidden.shape[:-1]):
        raise ValueError(
            f"labels are int64 of shape {list(hidden.shape[:-1])}, not {labels.dtype} {list(labels.shape)}"
        )
    if chunk_tokens is not None and (chunk_tokens < 1 or keep_logits):
        raise ValueError(f"chunk_tokens is 1 or more, and of logits that are not kept; not {chunk_tokens}")
    if fuse_wgrad_accumulation and getattr(w_VD, "main_grad", None) is None:
        raise ValueError("fuse_wgrad_accumulation needs a weight with a main_grad")
    # tensors without values, and graphs, take the one that is made of torch's own operators
    kernels = "reference" if custom_ops.named(hidden) else kernels
    implementation = registry.use("cross_entropy", "bf16", hidden.device.type, kernels)
    keep_logits = keep_logits and torch.is_grad_enabled() and (hidden.requires_grad or w_VD.requires_grad)
    if keep_logits:
        chunk_tokens = max(1, labels.numel())
    elif chunk_tokens is None:
        tokens = _CHUNK_BYTES // (w_VD.shape[0] * w_VD.element_size())
        chunk_tokens = max(1, tokens // _CHUNK_STEP) * _CHUNK_STEP
    settings = _Settings(first, exchange, fuse_wgrad_accumulation, keep_logits, chunk_tokens, implementation)
    return _LinearCrossEntropy.apply(hidden, w_VD, labels, settings)


class _Settings(NamedTuple):
    first: int
    exchange: Exchange | None
    fuse: bool
    keep: bool
    chunk: int
    implementation: Any


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, w_VD, labels, settings):
        whole = hidden if settings.exchange is None else settings.exchange.gather(hidden)
        h_TD, labels_T = whole.reshape(-1, whole.shape[-1]), (labels - settings.first).reshape(-1)
        kept, statistics = [], []
        for h_CD, labels_C in zip(h_TD.split(settings.chunk), labels_T.split(settings.chunk), strict=True):
            logits_CV = h_CD @ w_VD.T
            statistics.append(settings.implementation.statistics(logits_CV, labels_C))
            if settings.keep:
                kept.append(logits_CV)
            del logits_CV  # before the next are made
        lse_T, target_T = (torch.cat(parts) for parts in zip(*statistics, strict=True))
        if settings.exchange is not None:
            lse_T, target_T = settings.exchange.combine(lse_T, target_T)
        ctx.settings, ctx.has_logits = settings, bool(kept)
        ctx.save_for_backward(hidden, w_VD, labels_T, lse_T, *kept)
        return (lse_T - target_T).view(labels.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, w_VD, labels_T, lse_T, *kept = ctx.saved_tensors
        if not ctx.has_logits:  # not kept, or their gradient is in their place
            kept = []
        ctx.has_logits = False
        settings: _Settings = ctx.settings
        needs_h, needs_w = ctx.needs_input_grad[:2]
        whole = hidden if settings.exchange is None else settings.exchange.gather(hidden)
        h_TD = whole.reshape(-1, whole.shape[-1])
        grad_h_TD = torch.empty_like(h_TD) if needs_h else None
        total_VD: torch.Tensor | None = w_VD.main_grad if settings.fuse else None
        for start in range(0, h_TD.shape[0], settings.chunk):
            at = slice(start, start + settings.chunk)
            grad_CV = kept.pop() if kept else h_TD[at] @ w_VD.T  # the logits
            grad_CV = settings.implementation.gradient(grad_CV, labels_T[at], lse_T[at], grad.reshape(-1)[at])
            if grad_h_TD is not None:
                torch.mm(grad_CV, w_VD, out=grad_h_TD[at])
            if needs_w:
                total_VD = _added(total_VD, grad_CV.T, h_TD[at])
            del grad_CV  # before the next are made
        received = None
        if grad_h_TD is not None:
            grad_h = grad_h_TD.view(whole.shape)
            received = (lambda: grad_h) if settings.exchange is None else settings.exchange.reduce(grad_h)
        grad_w_VD = None
        if settings.fuse:
            grad_w_VD = main_grad.added(w_VD)
        elif needs_w:  # without a token there is no product
            grad_w_VD = torch.zeros_like(w_VD) if total_VD is None else total_VD.to(w_VD.dtype)
        return None if received is None else received(), grad_w_VD, None, None


def _added(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`total + a @ b` in fp32, in total's memory where there is one: on a GPU without another of its size."""
    wider = a.is_cuda and a.dtype != torch.float32  # products that a GPU gives in fp32
    how = {"out_dtype": torch.float32} if wider else {}
    if total is not None and a.is_cuda:
        return torch.addmm(total, a, b, out=total, **how)
    product = torch.mm(a, b, **how) if wider else a.float() @ b.float()
    return product if total is None else total.add_(product)

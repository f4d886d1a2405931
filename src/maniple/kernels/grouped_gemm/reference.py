"""Oracle of grouped GEMM: a loop over groups in fp32, rounded once to the result's dtype.

The loop needs the groups' sizes on the host. Without `splits` it reads `ends_G` there, which waits for the device;
under fake and meta tensors, where there are no values to read, the groups are taken as equally full.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch._subclasses.fake_tensor import is_fake


def forward(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
    layout: str = "nk",
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """`out[s] = x[s] @ w[g]ᵀ + bias_scale[s] * bias[g]`; `[S, N]` in x's dtype. Arguments: see `grouped_gemm`."""
    n = w_G.shape[1] if layout == "nk" else w_G.shape[2]
    out_SN = x_SK.new_empty(x_SK.shape[0], n)
    end = 0
    for g, start, end in _groups(ends_G, x_SK.shape[0], splits):
        w_KN = w_G[g].float().t() if layout == "nk" else w_G[g].float()
        rows_N = x_SK[start:end].float() @ w_KN
        if bias_GN is not None:
            bias_N = bias_GN[g].float()
            rows_N += bias_N if bias_scale_S is None else bias_scale_S[start:end, None].float() * bias_N
        out_SN[start:end] = rows_N
    if zero_tail:
        out_SN[end:] = 0
    return out_SN


def dgrad(
    grad_SN: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    layout: str = "nk",
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """Gradient of x: `grad[s] @ w[g]`; `[S, K]` in grad's dtype. Tail as in `forward`."""
    other = "kn" if layout == "nk" else "nk"
    return forward(grad_SN, w_G, ends_G, layout=other, zero_tail=zero_tail, splits=splits)


def wgrad(
    x_SK: torch.Tensor,
    grad_SN: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    layout: str = "nk",
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """Gradient of w: `grad[rows of g]ᵀ @ x[rows of g]` in w's layout, exactly zero for an empty group.

    Written to `out` (any dtype) or to a new tensor of x's dtype. `accumulate` adds to `out`, once, instead; then an
    empty group leaves its part of `out` as it was. Raises ValueError for `accumulate` without `out`.
    """
    if accumulate and out is None:
        raise ValueError("wgrad accumulates into out: pass it")
    k, n = x_SK.shape[1], grad_SN.shape[1]
    shape = (ends_G.shape[0], n, k) if layout == "nk" else (ends_G.shape[0], k, n)
    if out is None:
        out = x_SK.new_empty(shape)
    elif out.shape != shape:
        raise ValueError(f"wgrad needs out of shape {list(shape)}, not {list(out.shape)}")
    for g, start, end in _groups(ends_G, x_SK.shape[0], splits):
        if start == end:
            if not accumulate:
                out[g] = 0
            continue
        x_RK, grad_RN = x_SK[start:end].float(), grad_SN[start:end].float()
        product = grad_RN.t() @ x_RK if layout == "nk" else x_RK.t() @ grad_RN
        if accumulate:
            out[g] += product
        else:
            out[g] = product
    return out


def bias_grad(
    grad_SN: torch.Tensor,
    ends_G: torch.Tensor,
    bias_GN: torch.Tensor,
    bias_scale_S: torch.Tensor | None,
    *,
    splits: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of the bias, `[G, N]`, and of its scale, `[S]` with a zero tail (None without a scale)."""
    grad_bias_GN = torch.zeros_like(bias_GN)
    grad_scale_S = None if bias_scale_S is None else torch.zeros_like(bias_scale_S)
    for g, start, end in _groups(ends_G, grad_SN.shape[0], splits):
        grad_RN = grad_SN[start:end].float()
        if bias_scale_S is None or grad_scale_S is None:
            grad_bias_GN[g] = grad_RN.sum(0)
        else:
            grad_bias_GN[g] = bias_scale_S[start:end].float() @ grad_RN
            grad_scale_S[start:end] = grad_RN @ bias_GN[g].float()
    return grad_bias_GN, grad_scale_S


def _groups(ends_G: torch.Tensor, slots: int, splits: list[int] | None) -> Iterator[tuple[int, int, int]]:
    """(g, first row, end) of every group, empty ones too."""
    count = ends_G.shape[0]
    if splits is not None:
        sizes = splits
    elif is_fake(ends_G) or ends_G.is_meta:
        sizes = [slots // count + (g < slots % count) for g in range(count)]
    else:
        ends = ends_G.tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if len(sizes) != count or min(sizes, default=0) < 0 or sum(sizes) > slots:
        raise ValueError(f"{count} groups in {slots} rows cannot have sizes {sizes}")
    start = 0
    for g, size in enumerate(sizes):
        yield g, start, start + size
        start += size

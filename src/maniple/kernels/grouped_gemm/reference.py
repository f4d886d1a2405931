"""Oracle of grouped GEMM: a loop over groups in fp32, rounded once to the result's dtype.

The loop needs the groups' sizes on the host. Without `splits` it reads `ends_G` there, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from maniple.kernels.quantize.reference import gathered
from maniple.kernels.swiglu import reference as swiglu_reference


def forward(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
    source_S: torch.Tensor | None = None,
    layout: str = "nk",
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """`out[s] = x[s] @ w[g]ᵀ + bias_scale[s] * bias[g]`; `[S, N]` in x's dtype. Arguments: see `grouped_gemm`."""
    n = w_G.shape[1] if layout == "nk" else w_G.shape[2]
    slots = x_SK.shape[0] if source_S is None else source_S.shape[0]
    out_SN = x_SK.new_empty(slots, n)
    end = 0
    for g, start, end in _groups(ends_G, slots, splits):
        w_KN = w_G[g].float().t() if layout == "nk" else w_G[g].float()
        rows_N = gathered(x_SK, source_S, start, end).float() @ w_KN
        if bias_GN is not None:
            bias_N = bias_GN[g].float()
            rows_N += bias_N if bias_scale_S is None else bias_scale_S[start:end, None].float() * bias_N
        out_SN[start:end] = rows_N
    if zero_tail:
        out_SN[end:] = 0
    return out_SN


def forward_swiglu(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    bias_G2F: torch.Tensor | None = None,
    probs_S: torch.Tensor | None = None,
    source_S: torch.Tensor | None = None,
    alpha: float = 1.0,
    limit: float | None = None,
    up_offset: float = 0.0,
    gate_up: str = "stacked",
    layout: str = "nk",
    keep: bool = True,
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`act [S, F]` = SwiGLU of `gate_up [S, 2F]` = `forward(...)` as rounded to x's dtype; both are returned.

    keep: whether gate_up is needed; without, `[0, 2F]` stands for it. Other arguments: see `grouped_gemm_swiglu`.
    """
    x_S2F = forward(x_SK, w_G, ends_G, bias_GN=bias_G2F, source_S=source_S, layout=layout, splits=splits)
    act_SF = swiglu_reference.forward(x_S2F, probs_S, alpha=alpha, limit=limit, up_offset=up_offset, layout=gate_up)
    if zero_tail:
        act_SF[ends_G[-1] if splits is None else sum(splits) :] = 0  # the tail's probs may be NaN
    return act_SF, x_S2F if keep else x_S2F[:0]


def dgrad(
    grad_SN: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    layout: str = "nk",
    zero_tail: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """Gradient of the rows that were multiplied: `grad[s] @ w[g]`; `[S, K]` in grad's dtype. Tail as in `forward`."""
    other = "kn" if layout == "nk" else "nk"
    return forward(grad_SN, w_G, ends_G, layout=other, zero_tail=zero_tail, splits=splits)


def gather_sum(rows_SD: torch.Tensor, slots_TK: torch.Tensor, ends_G: torch.Tensor) -> torch.Tensor:
    """`out[t]` = sum of the rows `slots[t, 0], slots[t, 1], …` in that order; `[T, D]`, fp32 inside, rounded once.

    A slot that is negative, or at or past `ends_G[-1]` or the last row, adds nothing. With `slots` the inverse of a
    gather's sources this is the gather's gradient.
    """
    rows, d = rows_SD.shape
    out_TD = rows_SD.new_zeros((slots_TK.shape[0], d), dtype=torch.promote_types(rows_SD.dtype, torch.float32))
    if rows:
        used_TK = (slots_TK >= 0) & (slots_TK < ends_G[-1].clamp(max=rows))
        slots_TK = slots_TK.clamp(0, rows - 1)
        for k in range(slots_TK.shape[1]):
            out_TD += torch.where(used_TK[:, k, None], rows_SD[slots_TK[:, k]], 0)
    return out_TD.to(rows_SD.dtype)


def wgrad(
    x_SK: torch.Tensor,
    grad_SN: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    source_S: torch.Tensor | None = None,
    layout: str = "nk",
    out: torch.Tensor | None = None,
    accumulate: bool = False,
    splits: list[int] | None = None,
) -> torch.Tensor:
    """Gradient of w: `grad[rows of g]ᵀ @ x[rows of g]` in w's layout, exactly zero for an empty group.

    With `source_S` row s of x is `x[source[s]]`, as in `forward`. Written to `out` (any dtype) or to a new tensor of
    x's dtype. `accumulate` adds to `out`, once, instead; then an empty group leaves its part of `out` as it was.
    Raises ValueError for `accumulate` without `out`.
    """
    if accumulate and out is None:
        raise ValueError("wgrad accumulates into out: pass it")
    k, n = x_SK.shape[1], grad_SN.shape[1]
    shape = (ends_G.shape[0], n, k) if layout == "nk" else (ends_G.shape[0], k, n)
    if out is None:
        out = x_SK.new_empty(shape)
    elif out.shape != shape:
        raise ValueError(f"wgrad needs out of shape {list(shape)}, not {list(out.shape)}")
    for g, start, end in _groups(ends_G, grad_SN.shape[0], splits):
        if start == end:
            if not accumulate:
                out[g] = 0
            continue
        x_RK, grad_RN = gathered(x_SK, source_S, start, end).float(), grad_SN[start:end].float()
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
    else:
        ends = ends_G.tolist()
        sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    if len(sizes) != count or min(sizes, default=0) < 0 or sum(sizes) > slots:
        raise ValueError(f"{count} groups in {slots} rows cannot have sizes {sizes}")
    start = 0
    for g, size in enumerate(sizes):
        yield g, start, start + size
        start += size

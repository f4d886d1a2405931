"""What the public functions of grouped GEMM ask of their operands."""

from __future__ import annotations

import torch

INTEGERS = torch.int32, torch.int64


def check_operands(
    x_SK: torch.Tensor,
    w_G: torch.Tensor,
    ends_G: torch.Tensor,
    source_S: torch.Tensor | None,
    slots_TK: torch.Tensor | None,
    layout: str,
    bias_GN: torch.Tensor | None = None,
    bias_scale_S: torch.Tensor | None = None,
) -> tuple[int, int]:
    """(S, N), or ValueError for what does not fit."""
    if layout not in ("nk", "kn"):
        raise ValueError(f"layout is nk or kn, not {layout!r}")
    if x_SK.dim() != 2 or w_G.dim() != 3 or ends_G.shape != w_G.shape[:1] or ends_G.dtype != torch.int32:
        raise ValueError(
            f"grouped_gemm needs x [S, K], w [G, ., .] and int32 ends [G], not {list(x_SK.shape)}, {list(w_G.shape)} "
            f"and {ends_G.dtype} {list(ends_G.shape)}"
        )
    k, n = (w_G.shape[2], w_G.shape[1]) if layout == "nk" else (w_G.shape[1], w_G.shape[2])
    if x_SK.shape[1] != k or x_SK.dtype != w_G.dtype:
        raise ValueError(f"x [S, {x_SK.shape[1]}] {x_SK.dtype} does not fit w with K = {k} {w_G.dtype}")
    if source_S is None:
        if slots_TK is not None:
            raise ValueError("slots are of gathered rows: pass source too")
    elif source_S.dim() != 1 or source_S.dtype not in INTEGERS:
        raise ValueError(f"source needs integers [S], not {source_S.dtype} {list(source_S.shape)}")
    elif slots_TK is None:
        if x_SK.requires_grad and torch.is_grad_enabled():
            raise ValueError("the gradient of gathered rows needs slots [T, C]: where each token went")
    elif slots_TK.dim() != 2 or slots_TK.shape[0] != x_SK.shape[0] or slots_TK.dtype not in INTEGERS:
        raise ValueError(f"slots needs integers [{x_SK.shape[0]}, C], not {slots_TK.dtype} {list(slots_TK.shape)}")
    slots = (x_SK if source_S is None else source_S).shape[0]
    if bias_GN is not None and bias_GN.shape != (w_G.shape[0], n):
        raise ValueError(f"bias needs shape [{w_G.shape[0]}, {n}], not {list(bias_GN.shape)}")
    if bias_scale_S is not None and (bias_GN is None or bias_scale_S.shape != (slots,)):
        raise ValueError("bias_scale needs a bias and shape [S]")
    return slots, n

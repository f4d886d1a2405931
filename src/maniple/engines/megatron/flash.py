"""Causal attention by torch's flash kernels, with what `scaled_dot_product_attention` does not hand on to them: sliding
windows, attention sinks, queries that are the last of more keys. There is no bias, and blocks outside a window are not
looked at.

A sink adds exp(s) to a query's sum of exponentials. Flash attention gives the result without it, and lse, the logarithm
of that sum: with lse' = log(exp(lse) + exp(s)) the result is exp(lse - lse') times as large. Its backward pass (Dao,
2023, FlashAttention-2, algorithm 2) makes probabilities as exp(score - lse), and beside them needs of the softmax only
delta, the product of the result and its gradient: with lse' and the scaled result it gives the gradients beside a sink.
That of the sink is the sum over queries of -exp(s - lse') delta.

Shapes as in `attention.py`; operands lie as they come, whatever their strides.
"""

from __future__ import annotations

import torch

_MOST = 192  # head size; backward passes of larger ones are not for every GPU (sdp_utils.cpp)
_ops = torch.ops.aten


def takes(q_BHLD: torch.Tensor, v_BGNV: torch.Tensor) -> bool:
    """Whether these kernels are for such operands: on NVIDIA's GPUs (and in dry runs, which stand for them) from sm_80
    on, in half precision, with heads of one size. AMD's kernels have not been tried."""
    device = q_BHLD.is_meta or (
        q_BHLD.is_cuda
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(q_BHLD.device) >= (8, 0)
    )
    size = q_BHLD.shape[-1]
    halves = q_BHLD.dtype in (torch.bfloat16, torch.float16)
    return device and halves and size == v_BGNV.shape[-1] and size <= _MOST and size % 8 == 0


def attention(q_BHLD, k_BGND, v_BGND, window: int | None, sinks_H: torch.Tensor | None, scale: float) -> torch.Tensor:
    """`[B, H, L, D]`: the L queries are the last of N tokens, and each sees itself and `window - 1` keys before it."""
    q_BLHD, k_BNGD, v_BNGD = (t.transpose(1, 2) for t in (q_BHLD, k_BGND, v_BGND))
    return _Flash.apply(q_BLHD, k_BNGD, v_BNGD, sinks_H, None if window is None else window - 1, scale).transpose(1, 2)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q_BLHD, k_BNGD, v_BNGD, sinks_H, before: int | None, scale: float):
        sizes = q_BLHD.shape[1], k_BNGD.shape[1]
        out_BLHD, lse_BHL, state, unused, _ = _ops._flash_attention_forward(
            *(q_BLHD, k_BNGD, v_BNGD, None, None, *sizes, 0.0, True, False),
            scale=scale,
            window_size_left=before,
            window_size_right=0,
        )
        if sinks_H is not None:
            whole_BHL = torch.logaddexp(lse_BHL, sinks_H.float()[:, None])
            out_BLHD.mul_((lse_BHL - whole_BHL).exp_().transpose(1, 2)[..., None])
            lse_BHL = whole_BHL
        ctx.save_for_backward(q_BLHD, k_BNGD, v_BNGD, out_BLHD, lse_BHL, sinks_H, state, unused)
        ctx.before, ctx.scale = before, scale
        return out_BLHD

    @staticmethod
    def backward(ctx, grad_BLHD):
        q_BLHD, k_BNGD, v_BNGD, out_BLHD, lse_BHL, sinks_H, state, unused = ctx.saved_tensors
        grads = _ops._flash_attention_backward(
            *(grad_BLHD, q_BLHD, k_BNGD, v_BNGD, out_BLHD, lse_BHL, None, None),
            *(q_BLHD.shape[1], k_BNGD.shape[1], 0.0, True, state, unused),
            scale=ctx.scale,
            window_size_left=ctx.before,
            window_size_right=0,
        )
        grad_H = None
        if sinks_H is not None:
            delta_BHL = (grad_BLHD.float() * out_BLHD).sum(-1).transpose(1, 2)
            grad_H = -((sinks_H.float()[:, None] - lse_BHL).exp_() * delta_BHL).sum((0, 2)).to(sinks_H.dtype)
        return *grads, grad_H, None, None

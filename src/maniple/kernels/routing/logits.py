"""The router's logits: fp32 products of whatever the model is in.

A product of two bf16 numbers is exact in fp32, so that tensor cores, which take bf16 and add up in fp32, give what fp32
operands would. In backward the logits' gradient is fp32: it is cut into three bf16 numbers whose sum it is, to the last
place, and multiplied as such. What is kept for backward is x as it came.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def router_logits(x_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> torch.Tensor:
    """fp32 logits `[T, E]`, as of operands cast to fp32 first, whatever their dtype. Gradients have their dtypes."""
    return _RouterLogits.apply(x_TD, weight_ED, bias_E)


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_ED, bias_E):
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        if not _on_tensor_cores(x_TD, weight_ED):
            return F.linear(x_TD.float(), weight_ED.float(), None if bias_E is None else bias_E.float())
        logits_TE = torch.mm(x_TD, weight_ED.t(), out_dtype=torch.float32)
        return logits_TE if bias_E is None else logits_TE.add_(bias_E)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_TE):
        x_TD, weight_ED = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grad_x_TD = grad_weight_ED = None
        if _on_tensor_cores(x_TD, weight_ED):
            parts_T3E = three_parts(grad_TE)
            if needs_x:
                grad_x_TD = torch.mm(parts_T3E, weight_ED.repeat(3, 1))
            if needs_weight:
                products_3ED = torch.mm(parts_T3E.t(), x_TD, out_dtype=torch.float32)
                grad_weight_ED = products_3ED.view(3, *weight_ED.shape).sum(0).to(weight_ED.dtype)
        else:
            if needs_x:
                grad_x_TD = (grad_TE @ weight_ED.float()).to(x_TD.dtype)
            if needs_weight:
                grad_weight_ED = (grad_TE.t() @ x_TD.float()).to(weight_ED.dtype)
        return grad_x_TD, grad_weight_ED, grad_TE.sum(0).to(ctx.bias_dtype) if needs_bias else None


def three_parts(x_TE: torch.Tensor) -> torch.Tensor:
    """fp32 `[T, E]` -> bf16 `[T, 3E]`: three numbers of 8 bits each whose sum is x's 24, largest first."""
    high = x_TE.bfloat16()
    rest = x_TE - high
    middle = rest.bfloat16()
    return torch.cat([high, middle, (rest - middle).bfloat16()], dim=1)


def _on_tensor_cores(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> bool:
    return x_TD.is_cuda and x_TD.dtype == weight_ED.dtype == torch.bfloat16

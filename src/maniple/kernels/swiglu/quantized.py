"""SwiGLU between two quantized products: its result, and gate_up's gradient, quantized before they are written.

An implementation is an object with the functions of `quantized_reference.py`. One that does not serve all operands says
so with `refusal(dtype, S, F, dtype of probs, float8)`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from maniple.kernels import chips, registry
from maniple.kernels.quantize.formats import RECIPES
from maniple.kernels.quantize.passed import How, Passed, stand_in
from maniple.kernels.swiglu import quantized_reference

OP = "quantized_swiglu"
_hopper = registry.LazyModule("maniple.kernels.swiglu.hopper")
registry.register(OP, "reference", RECIPES, registry.ANY_DEVICE, quantized_reference)
registry.register(
    OP,
    "hopper",
    {"fp8_block"},
    {"cuda"},
    _hopper,
    preference=1,
    reason_unavailable=chips.no_hopper,
    refuses=lambda *operands: _hopper.refusal(*operands),
)


@dataclass(frozen=True)
class _Settings:
    recipe: str
    dtype: torch.dtype
    device_type: str
    kernels: str
    made: Passed
    grad: Passed

    @property
    def implementation(self) -> Any:
        return registry.use(OP, self.recipe, self.device_type, self.kernels)

    def how(self, rowwise: bool, columnwise: bool) -> How:
        return How(self.recipe, self.dtype, "rceil", rowwise, columnwise)


def quantized_swiglu(
    gate_up_S2F: torch.Tensor,
    probs_S: torch.Tensor,
    ends_G: torch.Tensor,
    *,
    recipe: str,
    dtype: torch.dtype,
    made: Passed,
    grad: Passed,
    kernels: str,
) -> torch.Tensor:
    """A stand-in `[S, F]` for `probs * up * silu(gate)`, whose values are in `made`, quantized.

    The gradient of gate_up is quantized into `grad`, and a stand-in for it goes back. Operands are those of `swiglu`,
    stacked; recipe and dtype those of the products; kernels: an implementation's name.
    """
    settings = _Settings(recipe, dtype, gate_up_S2F.device.type, kernels, made, grad)
    return _QuantizedSwiGLU.apply(gate_up_S2F, probs_S, ends_G, settings)


def columns_again(act_SF: torch.Tensor) -> Callable[[], list[torch.Tensor]] | None:
    """Computes the columnwise data and scales of what `act_SF` stands for again, from gate and up. None where nothing
    is kept."""
    node: Any = act_SF.grad_fn
    if node is None:
        return None

    def again() -> list[torch.Tensor]:
        settings = node.settings
        return list(settings.implementation.forward(*node.saved_tensors, settings.how(False, True))[2:4])

    return again


class _QuantizedSwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate_up_S2F, probs_S, ends_G, settings):
        made = settings.made
        how = settings.how(made.rowwise, made.columnwise)
        made.put(settings.implementation.forward(gate_up_S2F, probs_S, ends_G, how), RECIPES[settings.recipe].rows)
        ctx.save_for_backward(gate_up_S2F, probs_S, ends_G)
        ctx.settings = settings
        return stand_in(gate_up_S2F, gate_up_S2F.shape[1] // 2)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_SF):
        settings, grad = ctx.settings, ctx.settings.grad
        how = settings.how(grad.rowwise, grad.columnwise)
        *parts, grad_probs_S = settings.implementation.backward(grad_SF, *ctx.saved_tensors, how)
        grad.put(tuple(parts), RECIPES[settings.recipe].rows)
        return stand_in(grad_SF, 2 * grad_SF.shape[1]), grad_probs_S, None, None

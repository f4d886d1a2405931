"""The low-precision linear layer as a grouped GEMM of one group: by whichever of its implementations serves best."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from maniple.kernels.grouped_gemm.low_precision_ops import operators_for, split
from maniple.kernels.linear.reference import Operand


@dataclass(frozen=True)
class Grouped:
    """The functions of `reference.py`, by the implementation `kernels` of the grouped GEMM in `recipe`."""

    recipe: str
    kernels: str

    def rows(
        self,
        x: Operand,
        w: Operand,
        ends_G: torch.Tensor,
        *,
        bias_N: torch.Tensor | None = None,
        out_dtype: torch.dtype,
    ) -> torch.Tensor:
        """As the reference's."""
        bias_1N = None if bias_N is None else bias_N[None]
        operands = *split(x), *split(w), ends_G, bias_1N, None
        return operators_for(ends_G).rows(*operands, out_dtype, False, None, self.recipe, self.kernels)

    def wgrad(
        self,
        grad: Operand,
        x: Operand,
        ends_G: torch.Tensor,
        *,
        out_dtype: torch.dtype,
        out_1NK: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As the reference's."""
        operators, operands = operators_for(ends_G), (*split(grad), *split(x), ends_G, "nk")
        if out_1NK is None:
            return operators.wgrad(*operands, out_dtype, self.recipe, self.kernels)
        operators.wgrad_into(*operands, out_1NK, True, self.recipe, self.kernels)
        return out_1NK

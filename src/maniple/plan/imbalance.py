"""How unevenly a router spreads tokens, as a distribution: the fullest rank's load over the mean.

A layer ends when its fullest rank does, so the factor multiplies both the experts' products and what that rank
receives. It is an input. The default, Dirichlet(8) over the experts, is what the project's benchmarks deal. Published
runs of Qwen3-235B (Megatron-MoE-ModelZoo, 65k and 131k tokens) lost 13 and 8 % with natural routing against forced.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, get_args

from maniple.errors import UserError

Kind = Literal["balanced", "factor", "dirichlet", "lognormal"]
# What a parameter may be: past these one expert has every token, or all have as many, and fp64 cannot draw the rest.
_BOUNDS: dict[str, tuple[float, float]] = {
    "balanced": (0.0, float("inf")),
    "factor": (1.0, sys.float_info.max),
    "dirichlet": (1e-3, 1e9),
    "lognormal": (0.0, 30.0),
}


@dataclass(frozen=True)
class Imbalance:
    """kind: `balanced` (every rank has the mean), `factor` (parameter is the factor itself), `dirichlet` (parameter is
    the concentration of each expert), `lognormal` (parameter is sigma of the logarithm of an expert's share)."""

    kind: Kind = "dirichlet"
    parameter: float = 8.0
    seed: int = 0

    def __post_init__(self) -> None:
        least, most = _BOUNDS[self.kind]
        if not least <= self.parameter <= most:  # not `<`: it is false of NaN
            bound = f"from {least:g} to {most:g}" if most < 1e10 else f"of {least:g} or more"
            raise UserError(f"--imbalance {self.kind} takes a parameter {bound}, not {self.parameter:g}")

    @classmethod
    def parse(cls, text: str) -> Imbalance:
        """A factor, `balanced`, `dirichlet:8` or `lognormal:0.3`; UserError for anything else."""
        if text == "balanced":
            return BALANCED
        kind, colon, number = text.partition(":")
        if not colon:
            kind, number = "factor", text
        try:
            parameter = float(number)
        except ValueError:
            parameter = None
        if parameter is None or kind not in get_args(Kind):
            raise UserError(f"imbalance {text!r}: write a factor such as 1.4, balanced, dirichlet:8 or lognormal:0.3")
        return cls(cast(Kind, kind), parameter)

    def factor(self, num_experts: int, ranks: int) -> float:
        """The mean over layers of the fullest rank's tokens over a rank's mean, experts dealt to ranks in order.

        At most `ranks`.
        """
        if self.kind == "balanced" or ranks == 1:
            return 1.0
        if self.kind == "factor":
            return min(self.parameter, float(ranks))  # where one rank has every token
        return _sampled(self.kind, self.parameter, self.seed, num_experts, ranks)


BALANCED = Imbalance("balanced")


def in_words(factor: float) -> str:
    """`1.2`, `1.09`: a load over the mean, to hundredths."""
    return f"{round(factor, 2):g}"


@cache
def _sampled(kind: str, parameter: float, seed: int, num_experts: int, ranks: int, layers: int = 512) -> float:
    import numpy as np

    draw = np.random.default_rng(seed)
    if kind == "dirichlet":
        shares_LE = draw.gamma(parameter, size=(layers, num_experts))  # Dirichlet up to the sum, which cancels
    else:
        shares_LE = draw.lognormal(sigma=parameter, size=(layers, num_experts))
    loads_LR = shares_LE.reshape(layers, ranks, num_experts // ranks).sum(2)
    return float((loads_LR.max(1) / loads_LR.mean(1)).mean())

"""How evenly the router spreads tokens over experts, from exact counts.

L MoE layers · E experts. A count is the number of (token, choice) pairs that an expert received in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class ExpertBalance:
    """Load statistics of one step.

    per_layer: busiest expert over mean expert, for each of the L layers; 1 is perfect, E is everything on one expert.
    overall: busiest expert of all layers over the mean expert of all layers.
    empty_fraction: share of the L x E experts that received no token.
    """

    per_layer: tuple[float, ...]
    overall: float
    empty_fraction: float


def expert_balance(counts_LE: Any) -> ExpertBalance:
    """Statistics of integer counts [L, E]: nested lists, numpy or torch (a device tensor is copied to the host).

    A layer that received no token at all counts as balanced (1.0), so that every value is finite.
    Raises ValueError if the counts are not a non-empty matrix of whole, non-negative numbers.
    """
    array_LE = np.asarray(counts_LE.tolist() if hasattr(counts_LE, "tolist") else counts_LE)
    if array_LE.ndim != 2 or not array_LE.size:
        raise ValueError(f"expert counts must be [layers, experts], got shape {array_LE.shape}")
    if (array_LE < 0).any() or (array_LE != np.floor(array_LE)).any():
        raise ValueError("expert counts must be whole numbers of at least 0")
    exact_LE = array_LE.astype(np.int64)
    return ExpertBalance(
        per_layer=tuple(_max_over_mean(row_E) for row_E in exact_LE),
        overall=_max_over_mean(exact_LE.ravel()),
        empty_fraction=float((exact_LE == 0).mean()),
    )


def _max_over_mean(counts: np.ndarray) -> float:
    total = int(counts.sum())
    return int(counts.max()) * counts.size / total if total else 1.0

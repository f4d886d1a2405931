"""Memory that was never written reads as NaN, so that whatever uses it shows in the result."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch


@contextlib.contextmanager
def poison() -> Iterator[None]:
    """`torch.empty` and kin are filled with NaN (integers: the largest)."""
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(3).isnan().all()
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = filled


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Import it into a conftest: its tests run in `poison`."""
    with poison():
        yield


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """|actual - expected| / |expected| in the 2-norm, fp64; NaN anywhere gives NaN, which is under no bound."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp(min=1e-30)).item()


def unit_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """As `relative_error`, for results of order 1: where sums cancel to less, relative to numbers of rms 1."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp(min=max(expected.numel(), 1) ** 0.5)).item()

"""The cross-entropy kernels under Triton's interpreter against the reference."""

from __future__ import annotations

import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st

from maniple.kernels.cross_entropy import reference
from maniple.kernels.cross_entropy import triton as kernels

pytestmark = pytest.mark.timeout(300)
assert triton.knobs.runtime.interpret, "run through test_interpreted.py"


@settings(max_examples=25, deadline=None)
@given(
    rows=st.integers(0, 6),
    vocabulary=st.integers(1, 100),
    scale=st.sampled_from([1e-3, 1.0, 100.0]),
    seed=st.integers(0, 99),
)
def test_statistics_and_gradient_are_the_references(rows, vocabulary, scale, seed):
    generator = torch.Generator().manual_seed(seed)
    padded = torch.full((rows, vocabulary + 3), torch.nan)  # rows lie apart, and what is between is never read
    logits_CV = padded[:, :vocabulary]
    logits_CV.copy_(torch.randn(rows, vocabulary, generator=generator) * scale)
    labels_C = torch.randint(-vocabulary, 2 * vocabulary, (rows,), generator=generator)
    lse_C, target_C = kernels.statistics(logits_CV, labels_C)
    wanted = reference.statistics(logits_CV, labels_C)
    torch.testing.assert_close(lse_C, wanted[0], rtol=1e-6, atol=1e-6)
    assert torch.equal(target_C, wanted[1])
    grad_C = torch.rand(rows, generator=generator)
    want = reference.gradient(logits_CV.clone(), labels_C, lse_C, grad_C)
    got = kernels.gradient(logits_CV, labels_C, lse_C, grad_C)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert got.data_ptr() == logits_CV.data_ptr()
    assert padded[:, vocabulary:].isnan().all()


def test_values_at_the_ends_of_the_range():
    inf = torch.inf
    logits_CV = torch.tensor([[-inf, 0.0, -inf], [3e38, 3e38, 0.0], [-3e38, -3e38, -inf], [torch.nan, 0.0, 1.0]])
    labels_C = torch.tensor([1, 0, 2, 1])
    lse_C, target_C = kernels.statistics(logits_CV, labels_C)
    wanted = reference.statistics(logits_CV, labels_C)
    torch.testing.assert_close(lse_C, wanted[0], equal_nan=True)
    assert target_C.tolist() == [0.0, 3e38, -inf, 0.0] or target_C[1] == torch.tensor(3e38)

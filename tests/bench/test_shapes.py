"""Shapes of the grouped GEMM benchmark, and its counts of operations and bytes."""

from __future__ import annotations

import pytest
import torch
from tests.bench.small import CEILINGS, CPU, SHAPE

from maniple.bench import ceilings
from maniple.bench.shapes import Shape, at_random, group_sizes, of_model
from maniple.errors import UserError
from maniple.models import load_card


def test_group_sizes_are_seeded_skewed_and_whole():
    sizes = group_sizes(128, 65_536, seed=3)
    assert sum(sizes) == 65_536
    assert sizes == group_sizes(128, 65_536, seed=3) != group_sizes(128, 65_536, seed=4)
    assert max(sizes) > 1.5 * min(sizes)
    assert sum(size % 128 == 0 for size in sizes) < 8
    # the spread of Dirichlet(8): a group's deviation is 1 / sqrt(8) of the mean
    deviation = torch.tensor(sizes, dtype=torch.float64).std().item() / 512
    assert 0.25 < deviation < 0.45


def test_rounded_groups_keep_the_rows_and_stay_near():
    shape = Shape("m", "fc1", 64, 64, group_sizes(32, 65_536, seed=1))
    near = shape.rounded(128)
    assert near.rows == 65_536
    assert all(size % 128 == 0 for size in near.sizes)
    assert max(abs(a - b) for a, b in zip(shape.sizes, near.sizes, strict=True)) < 128
    assert near.multiple == 128
    with pytest.raises(ValueError, match="256 rows are no multiple of 100"):
        SHAPE.rounded(100)


def test_padded_groups_keep_their_rows(operands):
    wide = operands.padded(128)
    assert all(size % 128 == 0 for size in wide.shape.sizes)
    assert sum(wide.shape.sizes) - sum(operands.shape.sizes) < 128 * operands.shape.groups
    assert wide.ends_G.tolist() == torch.tensor(wide.shape.sizes).cumsum(0).tolist()
    for few, many in ((operands.x_SK, wide.x_SK), (operands.grad_SN, wide.grad_SN)):
        parts = zip(few.split(operands.shape.sizes), many.split(wide.shape.sizes), strict=True)
        for some, group in parts:
            assert torch.equal(group[: len(some)], some)
            assert not group[len(some) :].any()
    facts = operands.shape.facts(128)
    assert (facts["rows"], facts["padded_rows"]) == (operands.shape.rows, wide.shape.rows)


def test_shapes_of_a_model_are_those_of_its_experts():
    fc1, fc2 = of_model(load_card("deepseek-v3"), rows=65_536, expert_parallel_size=8)
    assert (fc1.groups, fc1.n, fc1.k, fc1.rows) == (32, 4096, 7168, 65_536)
    assert (fc2.groups, fc2.n, fc2.k, fc2.rows) == (32, 7168, 2048, 65_536)
    fc1, fc2 = of_model(load_card("qwen3-30b-a3b"), rows=65_536)
    assert [(s.groups, s.n, s.k) for s in (fc1, fc2)] == [(128, 1536, 2048), (128, 2048, 768)]
    with pytest.raises(UserError, match="3 does not divide the 128 experts"):
        of_model(load_card("qwen3-30b-a3b"), rows=8, expert_parallel_size=3)


def test_random_shapes_are_seeded_and_uneven():
    first, second = at_random(7, rows=65_536)
    assert [first, second] == at_random(7, rows=65_536)
    assert [first, second] != at_random(8, rows=65_536)
    assert first.rows == second.rows == 65_536
    assert {first.n % 64, first.k % 64, second.n % 64, second.k % 64} == {0}
    assert any(size % 128 for size in first.sizes + second.sizes)


def test_counts_by_hand():
    s, n, k, groups, filled = 256, 48, 64, 6, 5
    assert SHAPE.flops == 2 * s * n * k
    assert SHAPE.bytes_moved("forward", "bf16") == 2 * (s * k + filled * n * k + s * n)
    assert SHAPE.bytes_moved("dgrad", "bf16") == 2 * (s * n + filled * n * k + s * k)
    assert SHAPE.bytes_moved("wgrad", "bf16") == 2 * (s * n + s * k + groups * n * k)
    assert SHAPE.bytes_moved("wgrad_accumulate", "bf16") == 2 * (s * n + s * k) + 8 * filled * n * k
    assert SHAPE.bytes_moved("forward", "fp8_block") == (1 + 1 / 32) * (s * k + filled * n * k) + 2 * s * n


def test_the_floor_is_the_larger_of_operations_and_bytes():
    assert CEILINGS.floor(2e9, 1e8, "bf16") == (2.0, "operations")
    assert CEILINGS.floor(2e9, 3e8, "bf16") == (3.0, "bytes")
    assert CEILINGS.floor(2e9, 1e7, "fp8") == (1.0, "operations")
    assert CEILINGS.floor(0.0, 1e8, "bf16") == (1.0, "bytes")
    assert CEILINGS.floor(2e9, 3e8, "mxfp8") is None


def test_measured_ceilings_are_sane():
    found = ceilings.measure(CPU, rounds=3)
    assert found.flops_per_s["bf16"] == found.flops_per_s["fp8"] > 1e8
    assert found.copy > 1e8

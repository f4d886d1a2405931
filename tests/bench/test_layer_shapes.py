"""Shapes of the MoE layer benchmark, and its counts."""

from __future__ import annotations

import pytest
from tests.bench.small import CPU

from maniple.bench.layer_operands import LayerOperands
from maniple.bench.layer_shapes import NAMED, PARTS, LayerShape, at_random, of_card, of_part
from maniple.errors import UserError
from maniple.models import load_card

pytestmark = pytest.mark.usefixtures("ceilings")


def test_the_shapes_are_those_that_peers_were_measured_at():
    sizes = [(s.hidden, s.ffn, s.experts, s.topk, s.tokens) for part in NAMED.values() for s in part]
    assert sizes == [
        (2048, 768, 128, 8, 16_384),
        (2048, 768, 128, 8, 32_768),
        (7168, 2048, 32, 8, 4_096),
        (4096, 1536, 16, 2, 16_384),
        (2880, 2880, 32, 4, 16_384),
    ]
    for name, part in NAMED.items():
        card = load_card(name)
        assert {(s.hidden, s.ffn) for s in part} == {(card.hidden_size, card.moe.expert_ffn_size)}
    assert [s.clamped for part in NAMED.values() for s in part] == [False] * 4 + [True]
    assert (*NAMED, "random") == PARTS


def test_random_shapes_are_seeded_and_odd():
    first, second = of_part("random", 7)
    assert (first, second) == at_random(7)
    assert at_random(7) != at_random(8)
    for shape in (first, second):
        assert shape.hidden % 16 == shape.ffn % 16 == 8
        assert shape.tokens % 2 == 1
        assert 60_000 < shape.rows <= 65_536
        assert 2 <= shape.topk < shape.experts
    assert (first.skew, second.skew) == (0.0, 1.0)


def test_a_cards_layer():
    assert of_card(load_card("deepseek-v3"), tokens=9, expert_parallel_size=8) == LayerShape(
        "deepseek-v3", 7168, 2048, 32, 8, 9
    )
    assert of_card(load_card("gpt-oss-20b"), tokens=9).clamped
    assert of_card(load_card("qwen3-30b-a3b"), tokens=9, expert_parallel_size=64).topk == 2
    with pytest.raises(UserError, match="3 does not divide the 128 experts"):
        of_card(load_card("qwen3-30b-a3b"), tokens=9, expert_parallel_size=3)
    with pytest.raises(UserError, match="nothing to measure"):
        of_card(load_card("qwen3-30b-a3b"), tokens=0)


def test_counts_by_hand(either):
    shape = either.shape
    assert shape.flops == 2 * shape.rows * (2 * 48 * 64 + 64 * 48)
    assert sum(shape.sizes) == shape.rows == shape.tokens * shape.topk
    facts = shape.facts()
    assert (facts["n"], facts["k"], facts["rows"], facts["largest_group"]) == (96, 64, shape.rows, max(shape.sizes))


def test_skew_makes_experts_uneven():
    even, uneven = (LayerOperands(LayerShape("s", 64, 8, 16, 4, 1000, skew=s), CPU, 0).shape.sizes for s in (0.0, 1.0))
    assert max(even) < 1.6 * min(even)
    assert max(uneven) > 4 * min(uneven)

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maniple.data.blend import LONGEST_PERIOD, Blend, parse_blend, period_slots
from maniple.errors import UserError


@pytest.mark.parametrize(
    ("items", "pairs"),
    [
        (["a"], [("a", None)]),
        (["a", "b"], [("a", None), ("b", None)]),
        (["0.7", "a", "0.3", "dir/b"], [("a", Fraction(7, 10)), ("dir/b", Fraction(3, 10))]),
        (["1e-3", "a", "0.999", "b"], [("a", Fraction(1, 1000)), ("b", Fraction(999, 1000))]),
        (["2", "a.bin"], [("a", Fraction(2))]),
        (["a.idx"], [("a", None)]),
        (["1_0"], [("1_0", None)]),  # names: Python takes both for numbers
        (["\uff11\uff10"], [("\uff11\uff10", None)]),
        ([".5", "a", "1.E+1", "b"], [("a", Fraction(1, 2)), ("b", Fraction(10))]),
    ],
)
def test_blend(items, pairs):
    assert parse_blend(items, "data.train") == pairs


@pytest.mark.parametrize(
    "items",
    [
        ["0.7", "a", "b"],
        ["a", "0.3", "b"],
        ["0.7", "0.3", "a", "b"],
        ["a", "0.7"],
        ["0", "a", "1", "b"],
        ["0.0", "a"],
        ["1e-999", "a"],
        ["-1", "a"],
        ["nan", "a"],
        ["inf", "a"],
    ],
)
def test_bad_blend_is_one_line(items):
    with pytest.raises(UserError, match=r"data\.train: ") as caught:
        parse_blend(items, "data.train")
    assert "\n" not in str(caught.value)


def worst_error(slots):
    """Largest distance, over all prefixes of a period and all datasets, from weight x samples."""
    blend = Blend(slots)
    datasets = np.array([blend(i)[0] for i in range(blend.period)])
    prefix = np.arange(1, blend.period + 1)
    return max(np.abs(np.cumsum(datasets == d) - prefix * s / blend.period).max() for d, s in enumerate(slots))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.just(1), st.integers(1, 60)), min_size=2, max_size=20))
def test_every_prefix_is_within_one_sample_of_its_weights(slots):
    assert worst_error(slots) <= 1 - 1 / (2 * len(slots) - 2) + 1e-9


@pytest.mark.parametrize("slots", [[1, 999], [999, 1], [1] * 20, [1] * 19 + [981], [500, 300, 199, 1]])
def test_extreme_weights(slots):
    assert worst_error(slots) < 1


@settings(max_examples=40, deadline=None)
@given(slots=st.lists(st.integers(1, 9), min_size=1, max_size=6), samples=st.integers(0, 200))
def test_each_dataset_is_read_from_its_first_sample_without_a_gap(slots, samples):
    blend = Blend(slots)
    read = [blend(index) for index in range(samples)]
    for dataset in range(len(slots)):
        mine = [sample for which, sample in read if which == dataset]
        assert mine == list(range(len(mine)))
        assert blend.count(dataset, samples) == len(mine)


def test_far_into_a_run():
    blend = Blend([1, 999])
    cycle = 10**12
    assert sorted(blend(1000 * cycle + i)[1] for i in range(1000) if blend(i)[0] == 0) == [cycle]
    assert blend.count(0, 1000 * cycle) == cycle


@pytest.mark.parametrize(
    ("weights", "slots"),
    [
        (["0.001", "0.999"], [1, 999]),
        (["3", "1"], [3, 1]),
        (["1", "1", "1"], [1, 1, 1]),  # a third is no decimal
        (["70", "30"], [7, 3]),
        (["0.00001", "1"], [1, 100_000]),
        (["7"], [1]),
    ],
)
def test_weights_as_written_are_exact(weights, slots):
    assert period_slots([Fraction(weight) for weight in weights]) == slots


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 10**13), min_size=2, max_size=20))
def test_token_counts_are_rounded_to_a_period(tokens):
    weights = [Fraction(t) for t in tokens]
    slots = period_slots(weights)
    period = sum(slots)
    assert period <= LONGEST_PERIOD
    shares = [float(weight / sum(weights)) for weight in weights]
    for count, share in zip(slots, shares, strict=True):
        assert abs(count - share * period) < 1
        if share * LONGEST_PERIOD > 100:
            assert count / period == pytest.approx(share, rel=0.02)


def test_a_weight_too_small_for_a_slot_gets_none():
    assert period_slots([Fraction(1), Fraction(10**9) + 7])[0] == 0

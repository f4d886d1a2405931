"""Published runs, all that have a model and a GPU card: the bars that the planner's time is held to.

`python -m tests.plan.published` prints every row.
"""

from __future__ import annotations

import statistics

from tests.plan import published


def _seen():
    return [(run, ratio) for run, ratio in published.ratios() if not run.held_out]


def test_the_median_error_is_at_most_15_percent():
    rows = _seen()
    assert len(rows) > 80
    assert published.median_error(ratio for _, ratio in rows) < 0.15
    for which in (max, statistics.median):  # runs of one configuration differ: against their best, and their median
        assert published.median_error(published.by_configuration(rows, which)) < 0.15


def test_gpus_that_no_constant_was_chosen_on_do_as_well():
    held = [ratio for run, ratio in published.ratios() if run.held_out]
    assert {run.gpu.name for run, _ in published.ratios() if run.held_out} == {"h800-sxm", "b300", "gb300-nvl72"}
    assert len(held) >= 40
    assert published.median_error(held) < 0.15


def test_layouts_are_ranked_as_measured():
    pairs, wrong = published.misordered()
    assert pairs >= 20
    assert len(wrong) <= 1, wrong


def test_every_row_is_reported_or_left_out_with_a_reason():
    runs, left = published.runs()
    with published.DATA.open(encoding="utf-8") as file:
        assert len(runs) + len(left) == sum(1 for _ in file) - 1
    assert all(why for _, _, why in left)
    text = published.report()
    assert all(f"{run.line:4} {run.model[:26]}" in text for run in runs)

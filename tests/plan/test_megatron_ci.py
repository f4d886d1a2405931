"""Peaks of the planner's kind of arithmetic against those that Megatron-LM's own functional tests publish.

Every row is printed (`pytest -s`), those left out with the reason. Nothing is fitted: see `megatron_te.py`.
"""

from __future__ import annotations

from tests.plan.megatron_te import planned, rows


def test_published_memory():
    within_allocated = within_peak = usable = 0
    for row in rows():
        if row.facts is None:
            print(f"line {row.line:2} {row.case} on {row.gpu}: left out, {row.why}")
            continue
        plan = planned(row)
        usable += 1
        allocated, peak = plan.allocated / row.allocated - 1, plan.peak / row.peak - 1
        within_allocated += abs(allocated) <= 0.03
        within_peak += abs(peak) <= 0.10
        print(
            f"line {row.line:2} {row.case} on {row.gpu}: allocated {plan.allocated / 2**30:.3f} GiB "
            f"({row.allocated / 2**30:.3f}, {allocated:+.1%}), peak {plan.peak / 2**30:.3f} GiB "
            f"({row.peak / 2**30:.3f}, {peak:+.1%}){'  MISS' if abs(allocated) > 0.03 or abs(peak) > 0.10 else ''}"
        )
    print(f"of {usable} rows {within_allocated} are within 3 % allocated and {within_peak} within 10 % at the peak")
    assert usable >= 34
    assert within_allocated >= 0.8 * usable
    assert within_peak >= 0.8 * usable

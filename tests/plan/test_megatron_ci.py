"""Peaks of the planner's kind of arithmetic against those that Megatron-LM's own functional tests publish.

Every row is printed (`pytest -s`), those left out with the reason. Nothing is fitted: see `megatron_te.py`.
"""

from __future__ import annotations

from tests.plan.megatron_te import inferred_gpus, planned, rows

_INSTANCES = "resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances"
_RESHARDED = "tp1_pp2_resume_torch_dist_reshard_2x1x4_te_8experts2parallel_dist_optimizer"
# Of rows that are missed, by what their case's name holds.
WHY_MISSED = {
    _INSTANCES: "the peaks of the case's own repetitions differ by 30 %; the lowest is met",
    _RESHARDED: "holds 40 MiB less than planned, where two runs of the same layout are met; why is not known",
}


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
        missed = abs(allocated) > 0.03 or abs(peak) > 0.10
        why = next((reason for words, reason in WHY_MISSED.items() if words in row.case), "")
        print(
            f"line {row.line:2} {row.case} on {row.gpus} {row.gpu} ({row.gpus_from}): "
            f"allocated {plan.allocated / 2**30:.3f} GiB ({row.allocated / 2**30:.3f}, {allocated:+.1%}), "
            f"peak {plan.peak / 2**30:.3f} GiB ({row.peak / 2**30:.3f}, {peak:+.1%})"
            f"{f'  MISS: {why}' if missed else ''}"
        )
        assert not missed or why, row.case
    print(f"of {usable} rows {within_allocated} are within 3 % allocated and {within_peak} within 10 % at the peak")
    assert usable >= 39
    assert within_allocated >= 0.8 * usable
    assert within_peak >= 0.8 * usable


def test_every_row_says_where_its_number_of_gpus_is_from():
    for row in rows():
        if row.facts is not None:
            assert row.gpus > 0, row.case
            assert row.gpus_from.startswith("recipes/") or row.gpus_from in ("moe/* run on 8", "inferred"), row.case


def test_inferred_numbers_of_gpus_follow_from_when_moments_come_into_being():
    inferred = {row.case.split("/")[1]: row for row in rows() if row.gpus_from == "inferred"}
    assert {name: row.gpus for name, row in inferred.items()} == {
        "mixtral_8x7b_tp1pp4ep8vpp8_release": 64,
        "mixtral_8x22b_tp2pp8ep8vpp1_release": 128,
        "deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release": 32,
        "deepseekv3_proxy_flex_tp2pp2emp16etp1cp1_gb_200_release_sm": 32,
    }
    assert all(inferred_gpus(row) == row.gpus for row in inferred.values())

"""A NaN or an infinity on one rank: every rank ends or goes on alike, the place is named, the update is not taken."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from tests.distributed_utils import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]

EP = {"parallel": {"expert_parallel_size": 2}}
TP = {"parallel": {"tensor_parallel_size": 2}}
PP = {"parallel": {"pipeline_parallel_size": 2, "pipeline_layout": "Et|ttmL"}}
OVERLAP = {"parallel": {"expert_parallel_size": 2, "distributed_optimizer": True, "overlap_grad_reduce": True}}
BF16 = {**OVERLAP, "precision": {"dtype": "bf16"}}


def _all_jobs(rank: int, world: int, folder: Path) -> dict[str, dict]:
    from tests.faults import poison_jobs as jobs

    w13, norm = jobs.weight("mlp.experts.w13", math.nan), "pre_mlp_layernorm.weight"
    attention = jobs.output("self_attention.linear_proj", math.nan)
    gradient = jobs.gradient(norm, math.inf)
    spikes = {"spike": "rollback", "spike_window": 8, "skip_steps": 1}
    skip, back = {"guard": {"nonfinite": "skip"}}, {"guard": {"nonfinite": "rollback"}}
    return {
        "weight on EP rank 1": jobs.run(folder, "w", {4: w13}, on=1, **EP, log={"figure": True}),
        "output on TP rank 1": jobs.run(folder, "tp", {4: attention}, on=1, **TP),
        "output on PP rank 1": jobs.run(folder, "pp", {4: jobs.output("mlp.experts", math.inf, 2)}, on=1, **PP),
        "gradient on DP rank 1": jobs.run(folder, "g", {4: gradient}, on=1, **EP),
        "gradient, overlapped": jobs.run(folder, "go", {4: gradient}, on=0, **OVERLAP),
        "gradient, bf16": jobs.run(folder, "gb", {4: gradient}, on=0, **BF16),
        "skip": jobs.run(folder, "skip", {4: gradient}, on=1, once=True, **EP, **skip),
        "skip too often": jobs.run(
            folder, "skips", {2: gradient}, on=1, **EP, guard={"nonfinite": "skip", "max_skips": 2}
        ),
        "rollback": jobs.run(folder, "back", {4: w13}, on=1, **EP, **back),
        "spike": jobs.run(
            folder, "spike", {11: jobs.loud(100.0)}, on=1, once=True, **EP, train={"steps": 14}, guard=spikes
        ),
        "rollback to nothing": jobs.run(folder, "none", {2: w13}, on=1, **EP, **back),
        "weight that no token met": jobs.run(folder, "idle", {2: w13}, on=1, after=True, **EP),
        "balancing bias": jobs.run(folder, "bias", {2: jobs.bias(float("inf"))}, on=1, after=True, **EP),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> list[dict[str, dict]]:
    return run_ranks(_all_jobs, 2, tmp_path_factory.mktemp("jobs"), timeout=500)


@pytest.mark.parametrize(
    ("job", "began"),
    [
        (
            "weight on EP rank 1",
            "in the weights before this step: weight decoder.layers.1.mlp.experts.w13 (rank 1): NaN",
        ),
        (
            "output on TP rank 1",
            "in the output of decoder.layers.1.self_attention.linear_proj, micro-batch 1 (rank 1): NaN",
        ),
        (
            "output on PP rank 1",
            "in the output of decoder.layers.2.mlp.experts, micro-batch 1 (rank 1): infinity in 1 of",
        ),
        ("gradient on DP rank 1", "in the gradient of decoder.layers.1.pre_mlp_layernorm.weight (rank 1): infinity in"),
        ("gradient, overlapped", "in the gradient of decoder.layers.1.pre_mlp_layernorm.weight (rank 0): infinity in"),
        ("gradient, bf16", "in the gradient of decoder.layers.1.pre_mlp_layernorm.weight (rank 0): infinity in"),
    ],
)
def test_every_rank_stops_and_names_the_place(found, job, began):
    errors = {ranks[job]["error"] for ranks in found}
    assert len(errors) == 1, errors
    (error,) = errors
    assert error is not None
    assert error.startswith("step 4: ")
    assert began in error
    assert "step_00000002 is the last before it" in error
    assert "\n" not in error
    for ranks in found:
        assert ranks[job]["saved"] == [2]
        assert ranks[job]["unchanged"] == {1: False, 2: False, 3: False, 4: True}
        assert [record["step"] for record in ranks[job]["records"] if "loss" in record] == [1, 2, 3]


def test_a_run_that_the_guard_ends_leaves_summary_and_picture(found):
    ended = ("weight on EP rank 1", 3), ("skip too often", 3), ("rollback to nothing", 1), ("balancing bias", 2)
    for job, steps in ended:
        summary = found[0][job]["summary"]
        assert (summary["stopped"], summary["steps"]) == ("by guard", steps)
        assert found[0][job]["drawn"] == (job == "weight on EP rank 1")
    (event,) = [record for record in found[0]["weight on EP rank 1"]["records"] if "event" in record]
    assert (event["step"], event["event"], event["action"]) == (4, "nonfinite", "stop")
    assert found[0]["skip"]["summary"]["stopped"] is None


def test_a_step_that_is_skipped_changes_nothing_and_the_run_goes_on(found):
    for ranks in found:
        job = ranks["skip"]
        assert job["error"] is None
        assert [number for number, same in job["unchanged"].items() if same] == [4]
        events = [record for record in job["records"] if "event" in record]
        assert [(e["step"], e["event"], e["action"]) for e in events] == [(4, "nonfinite", "skip")]
        assert "decoder.layers.1.pre_mlp_layernorm.weight (rank 1)" in events[0]["where"]
        steps = [record["step"] for record in job["records"] if "loss" in record]
        assert steps == [1, 2, 3, 4, 5, 6]
        assert job["saved"] == [2, 4, 6]
    rates = {record["step"]: record["learning_rate"] for record in job["records"] if "loss" in record}
    assert rates[5] == rates[4]  # the schedule counts updates


def test_skips_have_a_limit(found):
    for ranks in found:
        assert ranks["skip too often"]["error"].startswith(
            "step 4: gradient norm is inf, after 2 updates left out in a row"
        )


def test_a_rollback_takes_the_checkpoint_and_leaves_the_batch_out(found):
    for ranks in found:
        job = ranks["rollback"]
        assert job["error"] is None
        assert [record["step"] for record in job["records"] if "loss" in record] == [1, 2, 3, 5, 6]
        events = [record for record in job["records"] if "event" in record]
        assert [(e["step"], e["action"]) for e in events] == [(4, "rollback")]
        assert all(math.isfinite(record["loss"]) for record in job["records"] if "loss" in record)


def test_a_spike_is_seen_before_its_update_and_rolled_back(found):
    for ranks in found:
        job = ranks["spike"]
        assert job["error"] is None
        (event,) = [record for record in job["records"] if "event" in record]
        assert (event["step"], event["event"], event["action"], event["where"]) == (11, "spike", "rollback", None)
        assert "deviations above the median" in event["why"]
        assert job["unchanged"][11]
        steps = [record["step"] for record in job["records"] if "loss" in record]
        assert steps == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 13, 14]  # step 10 is saved, and so is not left out


def test_a_weight_that_is_not_finite_is_not_saved(found):
    for ranks in found:
        job = ranks["weight that no token met"]
        assert job["error"].startswith("step 2: weight decoder.layers.1.mlp.experts.w13 (rank 1): NaN in")
        assert job["saved"] == []


def test_a_balancing_bias_that_is_not_finite_is_not_saved(found):
    for ranks in found:
        job = ranks["balancing bias"]
        assert job["error"].startswith("step 2: the balancing bias of layer 1 (rank 1): infinity in")
        assert job["saved"] == []


def test_a_rollback_without_a_checkpoint_says_what_to_do(found):
    for ranks in found:
        assert "this run has no checkpoint yet: set checkpoint.save_interval" in ranks["rollback to nothing"]["error"]


def _updates(rank: int, world: int, folder: Path) -> list[bool]:
    from tests.engines.jobs import make_job, tiny_card
    from tests.faults import poison_jobs as jobs

    same = []
    for name, sections in (("fp32", EP), ("bf16", BF16)):
        sections = {**sections, "optimizer": {"clip_grad": 0.05}}  # below the norm, so that all is scaled
        job = make_job(folder, name, **sections)
        ours, upstreams = jobs.two_jobs_alike(folder, job, tiny_card("deepseek-v3"))
        same.append(all(bool((a == b).all()) for a, b in zip(ours, upstreams, strict=True)))
    return same


def _upstream_takes_a_nan(rank: int, world: int, folder: Path) -> bool:
    import torch
    from tests.engines.jobs import make_job, tiny_card

    from maniple.engines.megatron import parallel, trainer

    job = make_job(folder, "nan", train={"steps": 1})
    device = parallel.pick_device(job)
    parallel.start(job, device)
    run = trainer.Trainer(job, tiny_card("deepseek-v3"), device)
    first = next(run.chunks[0].parameters())
    first.main_grad.fill_(torch.nan)
    updated, _, _ = run.optimizer.step()
    run.writer.close()
    parallel.stop_groups()
    return bool(updated) and bool(torch.isnan(first).any())


def test_an_update_is_upstreams_to_the_bit(tmp_path):
    assert run_ranks(_updates, 2, tmp_path, timeout=300) == [[True, True]] * 2


def test_upstream_itself_takes_a_step_with_nan(tmp_path):
    """When this fails `step.prepare_update` and `apply_update` may become upstream's own step again."""
    assert run_ranks(_upstream_takes_a_nan, 1, tmp_path) == [True]

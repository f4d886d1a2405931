"""The same numbers at every layout: up to eight processes compute what one does.

Each case runs two steps with clipping really active; loss, MTP, balance and z losses, expert counts, gradient norm,
every gradient and every weight and balancing bias after the steps must agree with one process that sees the same
weights and batches, and ranks must hold equal copies of what they share. Models are chosen so that MLA, GQA, sinks,
biases, shared experts, MTP and tied embeddings meet each parallelism.
"""

from __future__ import annotations

from typing import Any

import pytest
from tests.distributed.parity import CLIP, Case, Outcome, compare

pytestmark = pytest.mark.timeout(900)  # the first test waits for all processes
TOLERANCE = 1e-5  # of the largest magnitude in the tensor


def layout(tp=1, pp=1, ep=1, etp=1, vpp=None, text=None, **more: Any) -> dict[str, Any]:
    return {
        "tensor_parallel_size": tp,
        "pipeline_parallel_size": pp,
        "expert_parallel_size": ep,
        "expert_tensor_parallel_size": etp,
        "virtual_pipeline_size": vpp,
        "pipeline_layout": text,
        **more,
    }


DEEPSEEK, QWEN, GPT_OSS, GLM = "deepseek-v3", "qwen3-30b-a3b", "gpt-oss-20b", "glm-4.5"
TWO_STAGES = "Ett|tmL"
SIX, EIGHT, TIED = {"num_layers": 6}, {"num_layers": 8}, {"tied_embeddings": True}
DENSE_STAGE = {"num_layers": 6, "moe": {"num_dense_layers": 3}}
FUSED = {"train": {"loss": "fused"}}  # against logits on one process
DISTRIBUTED = {"distributed_optimizer": True}
BOUNDED = {"moe": {"buffer_factor": 1.0, "pages_factor": 1.0}}  # the first steps overflow
OVERLAPPED = {**DISTRIBUTED, "overlap_grad_reduce": True, "overlap_param_gather": True}

CASES = {
    "dp8-overlapped": Case(DEEPSEEK, 8, layout(**OVERLAPPED)),
    "ep8": Case(DEEPSEEK, 8, layout(ep=8)),
    "ep4-dp2": Case(DEEPSEEK, 8, layout(ep=4, **DISTRIBUTED)),
    "tp4-dp2-fused-loss": Case(DEEPSEEK, 8, layout(tp=4), sections=FUSED),
    "tp2-ep2-pp2-overlapped-fused-loss": Case(
        DEEPSEEK, 8, layout(tp=2, ep=2, pp=2, text=TWO_STAGES, **OVERLAPPED), sections=FUSED
    ),
    "tp2-ep2-etp2-pp2-bounded": Case(DEEPSEEK, 8, layout(tp=2, ep=2, etp=2, pp=2, text=TWO_STAGES), sections=BOUNDED),
    "etp2-ep2-dp8": Case("mixtral-8x7b", 8, layout(ep=2, etp=2)),
    "tp4-etp2-ep4": Case(DEEPSEEK, 8, layout(tp=4, ep=4, etp=2)),
    "dense-stage": Case(DEEPSEEK, 8, layout(pp=4, ep=2, text="Ettt|t|t|tmL"), DENSE_STAGE),
    "custom-interleaved": Case(DEEPSEEK, 8, layout(pp=2, tp=2, ep=2, text="Et|(tt|)*2tmL"), SIX),
    "embedding-alone": Case(DEEPSEEK, 8, layout(pp=4, text="E|tt|t|mL")),
    "loss-apart-fused": Case(DEEPSEEK, 8, layout(pp=4, text="Et|tt|m|L"), sections={"train": {"loss": "fused_kept"}}),
    "pp4-vpp2": Case(QWEN, 8, layout(pp=4, vpp=2, ep=2), EIGHT),
    "pp2-vpp2-overlapped": Case(QWEN, 8, layout(pp=2, vpp=2, ep=4, **OVERLAPPED), EIGHT),
    "tied-pp4-fused-loss": Case(QWEN, 8, layout(pp=4, tp=2), {**EIGHT, **TIED}, sections=FUSED),
    "tied-mtp": Case(GLM, 8, layout(pp=2, ep=2, text=TWO_STAGES, **DISTRIBUTED), TIED),
    "gpt-oss": Case(GPT_OSS, 8, layout(tp=2, pp=2, ep=4)),
    "glm": Case(GLM, 8, layout(tp=2, pp=2, ep=2, text=TWO_STAGES)),
    "minimax": Case("minimax-m2", 8, layout(tp=2, pp=2, ep=2)),
}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    return compare(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_same_numbers(outcomes, name):
    found = outcomes[name]
    assert not found.too_far(TOLERANCE)
    assert found.counts_agree
    assert not found.missing
    assert not found.unequal
    assert not {name: e for name, e in found.weights.items() if name.endswith("expert_bias") and e}  # to the bit
    assert all(stats.grad_norm > 3 * CLIP for stats in found.wanted["stats"])


def test_gradients_are_seen_but_where_the_optimizer_is_distributed(outcomes):
    for name, case in CASES.items():
        assert bool(outcomes[name].gradients) != case.parallel.get("distributed_optimizer", False), name


MASS = 100.0  # as an expert's bias it beats every score
EP4 = layout(ep=4)
FIRST_RANK, LAST_RANK = (MASS, MASS, *(0.0,) * 6), (*(0.0,) * 6, MASS, MASS)
TWO_EXPERTS = (0.0, 0.0, 0.0, MASS, MASS, 0.0, 0.0, 0.0)
FEW_EXPERTS = (*(-MASS,) * 5, MASS, 0.0, 0.0)
EXTREMES = {
    "all-to-rank-0": Case(DEEPSEEK, 4, EP4, bias=FIRST_RANK),
    "all-to-rank-3": Case(DEEPSEEK, 4, {**EP4, **DISTRIBUTED}, bias=LAST_RANK),
    "two-experts-hit": Case(GLM, 4, EP4, bias=TWO_EXPERTS),
    "few-experts-hit": Case(GLM, 4, layout(ep=2), bias=FEW_EXPERTS),
    "no-label-on-rank-2": Case(DEEPSEEK, 4, EP4, masked="rank 2"),
    "no-label-at-all": Case(DEEPSEEK, 4, EP4, masked="all"),
    "no-label-at-all-in-a-pipeline": Case(DEEPSEEK, 4, layout(ep=2, pp=2, text=TWO_STAGES), masked="all"),
}
IDLE = {
    "all-to-rank-0": [2, 3, 4, 5, 6, 7],
    "all-to-rank-3": [0, 1, 2, 3, 4, 5],
    "two-experts-hit": [0, 1, 2, 5, 6, 7],
    "few-experts-hit": [0, 1, 2, 3, 4],
}


@pytest.fixture(scope="module")
def extremes() -> dict[str, Outcome]:
    return compare(EXTREMES)


@pytest.mark.parametrize("name", EXTREMES)
def test_ranks_without_tokens_or_labels(extremes, name):
    found = extremes[name]
    assert found.counts_agree
    assert not found.too_far(TOLERANCE)
    assert not found.missing
    assert not found.unequal


@pytest.mark.parametrize("name", IDLE)
def test_the_routing_is_as_extreme_as_meant(extremes, name):
    wanted = extremes[name].wanted
    for loads in wanted["stats"][0].expert_counts.values():
        assert [expert for expert, load in enumerate(loads) if not load] == IDLE[name]


@pytest.mark.parametrize("name", IDLE)
def test_an_expert_without_tokens_has_a_gradient_of_zero(extremes, name):
    experts = {key: g for key, g in extremes[name].wanted["gradients"].items() if ".experts." in key}
    assert experts
    for key, gradient in experts.items():
        assert not gradient[IDLE[name]].any(), key


@pytest.mark.parametrize("name", ["no-label-at-all", "no-label-at-all-in-a-pipeline"])
def test_without_labels_the_loss_is_zero_and_everything_finite(extremes, name):
    found = extremes[name]
    for stats in found.wanted["stats"]:
        assert (stats.loss, stats.mtp_loss, stats.tokens) == (0.0, 0.0, 0)
    for tensor in (*found.wanted["gradients"].values(), *found.wanted["weights"].values()):
        assert tensor.isfinite().all()

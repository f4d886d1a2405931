"""Two Gloo processes compute what one does: expert-, pipeline-, tensor- and data-parallel, with any routing.

The same weights and the same global batch of four sequences go through the engine on one process and on two; loss,
every gradient, router statistics and the expert bias after the step must agree. Aux loss, z-loss and (where the model
has one) the expert bias are on. Collectives give up after 60 s: a rank that does not enter one fails the test.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks

from maniple.models import load_card

pytestmark = pytest.mark.timeout(480)  # the first test waits for all three processes
TOLERANCE = 1e-5  # of the largest magnitude in the tensor
EXPERTS = 8
MASS = 100.0  # as an expert's bias it beats every score


@dataclass(frozen=True)
class Case:
    """One job on two processes, and how the one process that it is compared with sees the same batch."""

    card: str
    parallel: dict[str, Any]
    overrides: dict[str, Any] = field(default_factory=dict)
    aux: str = "sequence"
    bias: tuple[float, ...] | None = None  # of every router; None: small and random
    unlabelled: bool = False  # no label of rank 1 counts
    joined: bool = False  # one process sees the two ranks' micro-batches as one
    steps: int = 1


EP2 = {"expert_parallel_size": 2}
FIRST, SECOND = (MASS,) * 4 + (0.0,) * 4, (0.0,) * 4 + (MASS,) * 4
CASES = {
    "normal": Case("deepseek-v3", EP2),
    "all-to-rank-0": Case("deepseek-v3", EP2, bias=FIRST),
    "all-to-rank-1": Case("deepseek-v3", EP2, bias=SECOND),
    "one-expert-each": Case("glm-4.5", EP2, bias=(MASS, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, MASS)),
    "few-experts-of-rank-0": Case("glm-4.5", EP2, bias=(0.0, 0.0, MASS, *(-MASS,) * 5)),
    "few-experts-of-rank-1": Case("glm-4.5", EP2, bias=(*(-MASS,) * 5, MASS, 0.0, 0.0)),
    "no-label-on-rank-1": Case("deepseek-v3", EP2, unlabelled=True),
    "biases": Case("gpt-oss-20b", EP2),
    "aux-of-micro-batch": Case("qwen3-30b-a3b", EP2, aux="micro_batch"),
    "aux-of-global-batch": Case("qwen3-30b-a3b", EP2, aux="global_batch", joined=True),
    "pipeline": Case("deepseek-v3", {"pipeline_parallel_size": 2, "pipeline_layout": "Ett|tmL"}),
    "pipeline-interleaved": Case(
        "qwen3-30b-a3b", {"pipeline_parallel_size": 2, "virtual_pipeline_size": 2}, {"num_layers": 4}
    ),
    "tensor": Case(
        "deepseek-v3", {"tensor_parallel_size": 2}
    ),  # experts whole on both ranks, each with half the tokens
    "tensor-and-expert": Case("deepseek-v3", {"tensor_parallel_size": 2, **EP2}),
    "expert-tensor": Case("deepseek-v3", {"tensor_parallel_size": 2, "expert_tensor_parallel_size": 2}),
    "tensor-of-heads": Case("gpt-oss-20b", {"tensor_parallel_size": 2}),
}
OPTIMIZERS = {
    "data-parallel": Case("deepseek-v3", {}, steps=2),
    "distributed-optimizer": Case("deepseek-v3", {"distributed_optimizer": True}, steps=2),
    "overlapped": Case(
        "deepseek-v3",
        {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
        steps=2,
    ),
    "expert-parallel": Case("deepseek-v3", EP2, steps=2),
    "expert-parallel-distributed-optimizer": Case("deepseek-v3", {**EP2, "distributed_optimizer": True}, steps=2),
}
Results = dict[str, dict[str, Any]]


def run(rank: int, world_size: int, cases: dict[str, Case]) -> Results:
    """In each process: this rank's part of every case, or with one process all of it."""
    return {name: _run(rank, world_size, case) for name, case in cases.items()}


def _run(rank: int, world_size: int, case: Case) -> dict[str, Any]:
    from tests.engines import helpers

    alone, joined = world_size == 1, world_size == 1 and case.joined
    card = load_card(case.card).tiny().with_overrides(case.overrides)
    job = helpers.make_job(
        parallel={} if alone else case.parallel,
        moe={"aux_loss_type": case.aux},
        train={"micro_batch_size": 2 if joined else 1},
    )
    bias_E = None if case.bias is None else torch.tensor(case.bias)
    engine = helpers.Engine(card, job, bias_E=bias_E)
    result: dict[str, Any] = {"cuts": engine.cuts()}
    for step in range(case.steps):
        batches = helpers.make_batches(card.vocab_size, 4, 1, seed=step)
        if case.unlabelled:
            for batch in batches[1::2]:
                batch["loss_mask"].zero_()
        if joined:
            pairs = zip(batches[0::2], batches[1::2], strict=True)
            batches = [{key: torch.cat([a[key], b[key]]) for key in a} for a, b in pairs]
        else:
            batches = batches[engine.data_parallel_rank :: engine.data_parallel_size]
        result["stats"] = engine.step(batches)
    if not job.parallel.distributed_optimizer:
        result["gradients"] = engine.gradients()
    if not job.parallel.overlap_param_gather:
        result["weights"] = engine.weights()
    return result


def whole(ranks: list[dict[str, Any]], key: str) -> dict[str, list[torch.Tensor]]:
    """By name: the tensor put together where the two ranks hold parts of it, else each rank's copy."""
    names = {name for rank in ranks for name in rank[key]}
    tensors = {name: [rank[key][name] for rank in ranks if name in rank[key]] for name in names}
    for name, found in tensors.items():
        for dim, _, _, halves in ranks[0]["cuts"].get(name, ()):
            parts = zip(*(part.chunk(halves, dim) for part in found), strict=True)
            tensors[name] = [torch.cat([piece for half in parts for piece in half], dim)]
    return tensors


def error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    scale = wanted.abs().max()
    return float((got - wanted).abs().max() / (scale if scale > 0 else 1))


@pytest.fixture(scope="module")
def results() -> tuple[Results, list[Results]]:
    return run_ranks(run, 1, CASES, timeout=180)[0], run_ranks(run, 2, CASES | OPTIMIZERS, timeout=180)


@pytest.mark.parametrize("name", CASES)
def test_loss_and_statistics(results, name):
    wanted = results[0][name]["stats"]
    for rank in (0, 1):
        stats = results[1][rank][name]["stats"]
        assert stats.tokens == wanted.tokens
        assert stats.expert_counts == wanted.expert_counts
        for figure in ("loss", "mtp_loss", "aux_loss", "z_loss", "grad_norm"):
            value = getattr(wanted, figure)  # None: the model has no MTP layer
            assert getattr(stats, figure) == (value if value is None else pytest.approx(value, rel=TOLERANCE)), figure


@pytest.mark.parametrize("name", CASES)
def test_every_gradient(results, name):
    wanted = results[0][name]["gradients"]
    got = whole([rank[name] for rank in results[1]], "gradients")
    assert set(got) == set(wanted)
    errors = {key: max(error(g, wanted[key]) for g in found) for key, found in got.items()}
    assert not {key: e for key, e in errors.items() if not e <= TOLERANCE}


@pytest.mark.parametrize("name", CASES)
def test_bias_after_the_step(results, name):
    wanted = {key: w for key, w in results[0][name]["weights"].items() if key.endswith("expert_bias")}
    got = whole([rank[name] for rank in results[1]], "weights")
    assert bool(wanted) == (load_card(CASES[name].card).moe.router.expert_bias)
    for key, bias_E in wanted.items():
        assert all(torch.equal(found, bias_E) for found in got[key]), key


@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("all-to-rank-0", {0, 1, 2, 3}),
        ("all-to-rank-1", {4, 5, 6, 7}),
        ("one-expert-each", {0, 7}),
        ("few-experts-of-rank-0", {0, 1, 2}),
        ("few-experts-of-rank-1", {5, 6, 7}),
    ],
)
def test_the_routing_is_as_extreme_as_meant(results, name, chosen):
    for loads in results[1][0][name]["stats"].expert_counts.values():
        assert {e for e in range(EXPERTS) if loads[e]} <= chosen
    unused = sorted(set(range(EXPERTS)) - chosen)
    for key, gradients in whole([rank[name] for rank in results[1]], "gradients").items():
        if ".experts." in key:
            assert not gradients[0][unused].any(), f"{key}: an expert without tokens has a gradient"


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("distributed-optimizer", "data-parallel"),
        ("overlapped", "data-parallel"),
        ("expert-parallel-distributed-optimizer", "expert-parallel"),
    ],
)
def test_optimizers_agree(results, name, like):
    for ranks in results[1]:
        got, wanted = ranks[name], ranks[like]
        assert got["stats"].loss == pytest.approx(wanted["stats"].loss, rel=1e-6)
        assert got["stats"].grad_norm == pytest.approx(wanted["stats"].grad_norm, rel=1e-5)
        if "weights" in got:
            errors = {key: error(w, wanted["weights"][key]) for key, w in got["weights"].items()}
            assert not {key: e for key, e in errors.items() if not e <= 1e-6}

"""bf16 with fp32 main parameters: what is kept in which dtype, and `deterministic` runs that are equal bit for bit."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

LAYOUTS: dict[str, dict[str, Any]] = {
    "data": {},
    "experts": {"expert_parallel_size": 2},
    "distributed": {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "tensors": {"tensor_parallel_size": 2},
}
VALIDATING = ("experts", "distributed")  # the second run validates after each step, which must change nothing


def train(rank: int, world_size: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    found = {
        name: [_train(parallel), _train(parallel, validates=name in VALIDATING)] for name, parallel in LAYOUTS.items()
    }
    return found | {"flags": _flags(folder)}


def _flags(folder: Path) -> list[dict[str, Any]]:
    """What the steps of two whole jobs ran under: torch's switch, by whether the job asks for it."""
    from tests.engines import jobs

    from maniple.engines.megatron import parallel, step

    parallel.stop_groups()  # of the engines before
    original, flags = step.train_step, []

    def observed(*args, **options):
        flags.append(torch.are_deterministic_algorithms_enabled())
        return original(*args, **options)

    step.train_step = observed
    try:
        for asked in (False, True):
            job = jobs.make_job(folder, f"asked-{asked}", train={"steps": 2, "deterministic": asked})
            jobs.run(job, jobs.tiny_card("deepseek-v3"))
    finally:
        step.train_step = original
        torch.use_deterministic_algorithms(False)
    return [{"flags": flags, "cublas": os.environ.get("CUBLAS_WORKSPACE_CONFIG")}]


def _train(parallel: dict[str, Any], validates: bool = False) -> dict[str, Any]:
    from tests.engines import helpers

    from maniple.engines.megatron import step
    from maniple.models import load_card

    card = load_card("deepseek-v3").tiny()
    job = helpers.make_job(
        parallel=parallel,
        precision={"dtype": "bf16"},
        optimizer={"clip_grad": 1.0},
        train={"micro_batch_size": 1, "deterministic": True, "eval_batches": 1},
    )
    engine = helpers.Engine(card, job)
    losses = []
    for seed in range(3):
        batches = helpers.make_batches(card.vocab_size, 4, 1, seed=seed)
        batches = batches[engine.data_parallel_rank :: engine.data_parallel_size]
        losses.append(engine.step(batches).loss)
        if validates:
            step.evaluate(engine.chunks, [iter(batches)], job, engine.device)
    if job.parallel.overlap_param_gather:
        for chunk in engine.chunks:
            chunk.start_param_sync(force_sync=True)
    parts = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    states = [state for part in parts for state in part.optimizer.state.values()]
    mains = [p for part in parts for group in part.optimizer.param_groups for p in group["params"]]
    return {
        "losses": losses,
        "moments": [state[key] for state in states for key in ("exp_avg", "exp_avg_sq")],
        "mains": [main.detach() for main in mains],
        "parameters": {str(p.dtype) for chunk in engine.chunks for p in chunk.parameters()},
        "gradients": {str(p.main_grad.dtype) for chunk in engine.chunks for p in chunk.parameters()},
        "weights": engine.weights(),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> list[dict[str, list[dict[str, Any]]]]:
    return run_ranks(train, 2, tmp_path_factory.mktemp("jobs"), timeout=400)


def test_a_job_that_asks_runs_deterministic_algorithms_and_no_other(runs):
    for rank in runs:
        assert rank["flags"] == [{"flags": [False, False, True, True], "cublas": ":4096:8"}]


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_runs_are_equal_bit_for_bit(runs, name):
    for rank in runs:
        one, other = rank[name]
        assert one["losses"] == other["losses"]
        assert len(set(one["losses"])) == 3
        for key in ("mains", "moments"):
            assert len(one[key]) == len(other[key]) > 0
            assert all(torch.equal(a, b) for a, b in zip(one[key], other[key], strict=True))
        assert all(torch.equal(weight, other["weights"][key]) for key, weight in one["weights"].items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_state_is_fp32_and_parameters_are_bf16(runs, name):
    for rank in runs:
        found = rank[name][0]
        assert found["parameters"] == {"torch.bfloat16"}
        assert found["gradients"] == {"torch.float32"}
        assert {tensor.dtype for tensor in (*found["moments"], *found["mains"])} == {torch.float32}
        assert all(tensor.any() for tensor in found["moments"] if tensor.numel() > 100)


def test_main_parameters_hold_what_bf16_cannot(runs):
    mains = runs[0]["data"][0]["mains"]
    assert any(not torch.equal(main, main.bfloat16().float()) for main in mains)

"""A job that is interrupted and resumed is, bit for bit, the job that was not; bad checkpoints are refused in one line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from maniple.metrics import read_metrics
from tests.distributed_utils import run_ranks

STEPS = 6
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    "fp32": {"parallel": {"distributed_optimizer": False}},
    "bf16-distributed-optimizer": {"parallel": {"distributed_optimizer": True}, "precision": {"dtype": "bf16"}},
}
EP2 = {"parallel": {"expert_parallel_size": 2, "distributed_optimizer": True}}
SAME = ("step", "loss", "mtp_loss", "aux_loss", "z_loss", "grad_norm", "learning_rate", "expert_counts")


def run_variants(rank: int, world_size: int, folder: Path, variants: dict) -> dict[str, Any]:
    """In each process: every variant uninterrupted, resumed and stopped; the final weights of each run."""
    return {name: _run(folder / name, sections, rank) for name, sections in variants.items()}


def _run(folder: Path, sections: dict, rank: int) -> dict[str, Any]:
    import torch.distributed as dist

    from tests.engines import jobs

    card = jobs.tiny_card("deepseek-v3")

    def run(name: str, *, resume: str | None = None, max_minutes: float | None = None, save_interval: int = 0):
        job = jobs.make_job(
            folder,
            name,
            **sections
            | {
                "train": {"steps": STEPS, "max_minutes": max_minutes},
                "checkpoint": {"resume": resume, "save_interval": save_interval, "save_at_end": True},
            },
        )
        return _weights(jobs.run(job, card))

    weights = {"straight": run("straight", save_interval=3)}
    weights["resumed"] = run("resumed", resume=str(folder / "straight" / "checkpoints" / "step_00000003"))
    run("stopped", resume="auto", max_minutes=1e-9)  # there is none yet: it starts afresh, and stops after a step
    if rank == 0:
        checkpoints = folder / "stopped" / "checkpoints"
        assert [path.name for path in checkpoints.iterdir()] == ["step_00000001"]
        (checkpoints / "step_00000009.partial").mkdir()  # of a job that was killed as it saved
        shutil.copy(checkpoints / "step_00000001" / "maniple.json", checkpoints / "step_00000009.partial")
    dist.barrier()
    weights["stopped"] = run("stopped", resume="auto")
    return weights


def _weights(trainer) -> dict[str, Any]:
    """Weights, biases of the routers, and the optimizer's fp32 weights and moments."""
    import torch

    from maniple.engines.megatron.model import unwrap

    chunk = unwrap(trainer.chunks[0])
    found = {name: t.clone() for name, t in chunk.state_dict().items() if isinstance(t, torch.Tensor)}
    inner = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
    for number, optimizer in enumerate(inner):
        for index, state in enumerate(optimizer.optimizer.state.values()):
            found |= {f"optimizer.{number}.{index}.{k}": v.clone() for k, v in state.items() if isinstance(v, torch.Tensor)}
    return found


def resume_alone(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """One process goes on from what two expert-parallel ones saved after step 3."""
    from tests.engines import jobs

    job = jobs.make_job(
        folder,
        "alone",
        parallel={"distributed_optimizer": True},
        train={"steps": STEPS},
        checkpoint={"resume": str(folder / "ep2" / "straight" / "checkpoints" / "step_00000003")},
    )
    return _weights(jobs.run(job, jobs.tiny_card("deepseek-v3")))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def runs(folder) -> dict[str, list[dict[str, Any]]]:
    """By variant: each rank's final weights by run."""
    alone = run_ranks(run_variants, 1, folder, VARIANTS, timeout=120)
    pair = run_ranks(run_variants, 2, folder, {"ep2": EP2}, timeout=120)
    return {name: [alone[0][name]] for name in VARIANTS} | {"ep2": [rank["ep2"] for rank in pair]}


def records(run_dir: Path) -> list[dict[str, Any]]:
    found = [r for r in read_metrics(run_dir / "metrics.jsonl") if "loss" in r]
    return [{key: record[key] for key in SAME} for record in found]


@pytest.mark.timeout(300)  # the first test waits for all processes
@pytest.mark.parametrize("variant", [*VARIANTS, "ep2"])
def test_resumed_equals_uninterrupted(runs, folder, variant):
    straight = records(folder / variant / "straight")
    assert [record["step"] for record in straight] == list(range(1, STEPS + 1))
    assert records(folder / variant / "resumed") == straight[3:]
    assert records(folder / variant / "stopped") == straight
    for rank in runs[variant]:
        for name in ("resumed", "stopped"):
            assert set(rank[name]) == set(rank["straight"])
            assert any("exp_avg_sq" in key for key in rank[name])
            different = [key for key, t in rank["straight"].items() if not t.equal(rank[name][key])]
            assert not different


@pytest.mark.parametrize("variant", [*VARIANTS, "ep2"])
def test_only_whole_checkpoints_are_left(runs, folder, variant):
    def left(name: str) -> list[str]:
        return sorted(path.name for path in (folder / variant / name / "checkpoints").iterdir())

    assert left("straight") == ["step_00000003", "step_00000006"]
    assert left("resumed") == ["step_00000006"]
    assert left("stopped") == ["step_00000001", "step_00000006", "step_00000009.partial"]


@pytest.mark.timeout(200)
def test_one_process_goes_on_where_two_left_off(runs, folder):
    (alone,) = run_ranks(resume_alone, 1, folder, timeout=60)
    wanted = records(folder / "ep2" / "straight")[3:]
    got = records(folder / "alone")
    assert [r["step"] for r in got] == [4, 5, 6]
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine["expert_counts"] == theirs["expert_counts"]
        for key in ("loss", "mtp_loss", "aux_loss", "grad_norm", "learning_rate"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-5), key
    ranks = [rank["straight"] for rank in runs["ep2"]]
    for key, weight in alone.items():
        if not key.startswith("optimizer."):
            parts = [rank[key] for rank in ranks] if ".experts." in key else [ranks[0][key]]
            error = (weight - (parts[0] if len(parts) == 1 else _joined(parts))).abs().max()
            assert error <= 1e-4, key

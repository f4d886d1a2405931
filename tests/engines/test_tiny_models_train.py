"""The tiny variant of every card trains on a CPU, through the trainer from data to summary, one job after the other."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tests.distributed_utils import run_ranks

from maniple.metrics import read_metrics
from maniple.models import list_cards, load_card

pytestmark = pytest.mark.timeout(600)  # the first test waits for the processes that do the work

STEPS, TOKENS = 5, 4 * 32  # of a step: see jobs.make_job
BF16 = "deepseek-v3"  # the others train in fp32
TRAINING_KEYS = {
    "step",
    "time",
    "loss",
    "aux_loss",
    "z_loss",
    "grad_norm",
    "learning_rate",
    "tokens_per_second_per_gpu",
    "tflops_per_gpu",
    "mfu",
    "step_seconds",
    "peak_memory_bytes",
    "imbalance",
    "expert_counts",
    "data",
}
SUMMARY_KEYS = {
    "validation_loss",
    "unigram_entropy",
    "steps",
    "tokens_per_second_per_gpu",
    "mfu",
    "peak_memory_bytes",
    "weights_from",
    "world_size",
    "model",
    "data",
    "precision",
    "seconds",
    "sample",
    "stopped",
    "hardware",
    "versions",
    "command",
}


def train_all(rank: int, world_size: int, folder: Path) -> None:
    """In a process of its own: trains every card."""
    from tests.engines import jobs

    from maniple.engines.megatron import trainer

    with jobs.no_process_group():
        for name in list_cards():
            job = jobs.make_job(
                folder,
                name,
                train={"steps": STEPS, "eval_interval": 3},
                precision={"dtype": "bf16" if name == BF16 else "fp32"},
                moe={"z_loss_coefficient": 1e-3},
            )
            assert trainer.main(job, jobs.tiny_card(name)) == 0


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run_ranks(train_all, 1, folder, timeout=400)
    return folder


@pytest.fixture(params=list_cards())
def name(request) -> str:
    return request.param


def test_loss_falls_and_stays_finite(runs, name):
    records = [r for r in read_metrics(runs / name / "metrics.jsonl") if "loss" in r]
    losses = [r["loss"] for r in records]
    assert [r["step"] for r in records] == list(range(1, STEPS + 1))
    assert not any("nonfinite" in r for r in records)
    assert abs(losses[0] - math.log(300)) < 0.1  # a fresh model knows nothing
    assert losses[-1] < losses[0] - 0.2
    assert all(0 < r["grad_norm"] < 100 for r in records)


def test_records(runs, name):
    card = load_card(name).tiny()
    records = read_metrics(runs / name / "metrics.jsonl")
    moe_layers = card.num_layers - card.moe.num_dense_layers + card.num_mtp_layers
    for record in (r for r in records if "loss" in r):
        assert set(record) == TRAINING_KEYS | ({"mtp_loss"} if card.num_mtp_layers else set())
        counts = record["expert_counts"]
        assert [len(row) for row in counts] == [card.moe.num_experts] * moe_layers
        assert [sum(row) for row in counts] == [TOKENS * card.moe.topk] * moe_layers
        assert record["imbalance"] >= 1
        assert record["z_loss"] > 0
        assert (record["aux_loss"] > 0.5) == (card.moe.router.aux_loss > 0)
        assert "synthetic" in record["data"]
        if card.num_mtp_layers:
            assert 0 < record["mtp_loss"] < 7
    validations = [r for r in records if "validation_loss" in r]
    assert [r["step"] for r in validations] == [3, STEPS]
    assert all(set(r) == {"step", "time", "validation_loss", "data"} for r in validations)
    assert validations[1]["validation_loss"] < validations[0]["validation_loss"]


def test_summary(runs, name):
    summary: dict[str, Any] = json.loads((runs / name / "summary.json").read_text(encoding="utf-8"))
    records = read_metrics(runs / name / "metrics.jsonl")
    assert set(summary) == SUMMARY_KEYS
    assert summary["validation_loss"] == records[-1]["validation_loss"]
    assert summary["steps"] == STEPS
    assert summary["world_size"] == 1
    assert summary["model"] == f"{name}-tiny"
    assert summary["hardware"]["device"] == "cpu"
    assert 0 < summary["unigram_entropy"] < math.log(300)
    assert summary["tokens_per_second_per_gpu"] > 0
    assert 0 < summary["mfu"] < 1
    assert not (runs / name / "checkpoints").exists()


def test_the_run_says_its_precision_and_kernels(runs, name):
    log = (runs / name / "logs" / "rank_0.log").read_text(encoding="utf-8")
    said = next(line for line in log.splitlines() if "parameters a rank" in line)
    assert said.endswith(", bf16" if name == BF16 else ", fp32")
    assert "kernels: " in log

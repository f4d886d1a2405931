"""Whole steps of Maniple's own on an H200, as recorded by benchmarks/whole_step.py, beside what is planned of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from maniple.bench.step_ours import job_of
from maniple.bench.whole_step import OURS, Plan
from maniple.hardware import load_gpu, lookup
from maniple.models import load_card
from maniple.plan.imbalance import BALANCED
from maniple.plan.time import estimate

ROOT = Path(__file__).parents[2]
TOLERANCE = 0.15
# the sources of a loss that made logits a second time in backward, as `train.loss=fused` still does
TWICE = "d3cab97531ce7a1f424c53f39caa326b4287b7b88ceb2dbdd24505881ba4d252"


def _rows() -> list[dict]:
    found = []
    for file in sorted((ROOT / "benchmarks" / "results").glob("*-h200-whole-step*.jsonl")):
        rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
        found += [row for row in rows if row["implementation"] == OURS and row.get("milliseconds")]
    return found


@pytest.mark.parametrize("row", _rows(), ids=lambda row: f"{row['recipe']}-{row['layers']}-{row['date']}")
def test_a_step_takes_about_as_long_as_planned(row):
    card = load_card(row["model"]).with_overrides({"num_layers": row["layers"]})
    sizes = row["sequence_length"], row["micro_batch_size"], row["micro_batches"]
    plan = Plan(card, *sizes, 0, 0, torch.device("cuda"), row["seed"], "")
    gpu = lookup(row["hardware"]["gpus"][0]["name"])
    assert gpu is load_gpu("h200-sxm")
    job = job_of(plan, row["recipe"])
    if row["sources"]["cross_entropy"] == TWICE:
        job = job.model_copy(update={"train": job.train.model_copy(update={"loss": "fused"})})
    step = estimate(job, card, gpu, 1, imbalance=BALANCED)
    print(f"{row['recipe']}: planned {step.seconds * 1e3:.0f} ms, measured {row['milliseconds']:.0f} ms")
    assert step.seconds * 1e3 == pytest.approx(row["milliseconds"], rel=TOLERANCE)
    assert step.tokens_per_second_per_gpu * step.seconds == pytest.approx(row["tokens_a_step"])


def test_there_are_such_rows():
    assert any(row["recipe"] == "bf16" for row in _rows())

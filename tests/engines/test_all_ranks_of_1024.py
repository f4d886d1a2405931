"""The dry run of a whole job of 1,024 ranks, at its real size: the shipped DeepSeek-V3 job, its chunks in turns."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from maniple.models import load_card
from maniple.models.counting import count, expert_parameters

ROOT = Path(__file__).parents[2]
STAGES, CHUNKS, WORLD, EXPERT_PARALLEL = 16, 2, 1024, 64
LAYOUT = [
    "parallel.pipeline_layout=Et*3|(tt|)*28,t|t|mL",
    f"parallel.expert_parallel_size={EXPERT_PARALLEL}",
    "recompute.granularity=full",
]
MICRO_BATCHES = 48  # that are run, of 128 a step: the others repeat a part of them


@pytest.mark.timeout(900)  # 88 and 176 s on two cores that had other work too
def test_every_distinct_rank_of_deepseek_v3_fits_its_partners():
    job = "train configs/deepseek_v3_1024.yaml --dry-run --all-ranks --json --world-size"
    data = ["data.train=[corpus/text]", "data.tokenizer=tokenizer/tokenizer.json"]
    command = [sys.executable, "-m", "maniple", *job.split(), str(WORLD), *data, *LAYOUT]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:] + run.stdout[-3000:]
    check(json.loads(run.stdout))


def check(found: dict[str, Any]) -> None:
    assert found["faults"] == []
    assert (found["world_size"], found["ranks_a_stage"]) == (WORLD, WORLD // STAGES)
    stages = found["stages"]
    assert [stage["pipeline_stage"] for stage in stages] == list(range(STAGES))
    assert len({*(stage["rank"] for stage in stages), *found["also_run"]}) == STAGES + 3
    assert all(stage["rank"] // (WORLD // STAGES) == stage["pipeline_stage"] for stage in stages)
    assert all(stage["micro_batches_run"] == MICRO_BATCHES for stage in stages)

    # a rank of each stage and the experts that it leaves to its peers are the model, and the embedding once more: the
    # stage of the MTP layer has a copy
    card = load_card("deepseek-v3")
    parameters = count(card)
    moe_layers = card.num_layers - card.moe.num_dense_layers + card.num_mtp_layers
    elsewhere = card.moe.num_experts - card.moe.num_experts // EXPERT_PARALLEL
    assert (
        sum(stage["parameters"] for stage in stages) + moe_layers * elsewhere * expert_parameters(card)
        == parameters.total_with_mtp + parameters.embedding
    )

    # of each chunk and micro-batch, an inner stage gets and gives the activations, and their gradients
    messages = [stage["groups"]["pipeline_model_parallel"]["calls"] for stage in stages]
    assert all(calls >= 4 * CHUNKS * MICRO_BATCHES for calls in messages[1:-1])

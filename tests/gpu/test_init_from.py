"""On a GPU a bf16 job begins with fp32 weights: the model's rounded, its main weights not."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.distributed.test_reshard import contents

pytestmark = pytest.mark.timeout(900)
JOB = """
model: {card: deepseek-v3, variant: tiny}
data: {source: synthetic, sequence_length: 128}
train: {global_batch_size: 4, micro_batch_size: 2, device: gpu, eval_batches: 1}
log: {tensorboard: false, figure: false, progress: false}
"""
BASE = ("precision.dtype=fp32", "train.steps=3", "optimizer.warmup_steps=0")
# so small a rate that no number of these changes
STILL = ("optimizer.learning_rate=1e-30", "optimizer.min_learning_rate=0", "moe.expert_bias_update_rate=0")
BEGUN = ("precision.dtype=bf16", "train.steps=1", "optimizer.warmup_steps=0", *STILL)


def train(folder: Path, name: str, *words: str) -> Path:
    command = [sys.executable, "-m", "maniple", "train", "job.yaml", "--nproc", "1", "--name", name, *words]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "runs" / name


def test_fp32_weights_in_a_bf16_job(tmp_path):
    (tmp_path / "job.yaml").write_text(JOB, encoding="utf-8")
    base = train(tmp_path, "base", *BASE) / "checkpoints" / "step_00000003"
    begun = train(tmp_path, "begun", *BEGUN, f"checkpoint.init_from={base}")
    assert json.loads((begun / "summary.json").read_text())["weights_from"] == f"{base} (step 3 of run base)"
    wanted, got = contents(base), contents(begun / "checkpoints" / "step_00000001")
    weights = [key for key in wanted if not key.startswith("optimizer.")]
    assert len(weights) > 40
    for key in weights:
        assert got[key].equal(wanted[key].to(got[key].dtype)), key
        if got[key].dtype == torch.bfloat16:
            assert got[f"optimizer.state.param.{key}"].equal(wanted[key]), key

"""Two ranks of a job on one GPU, in each layout: they lose what one rank loses from the same checkpoint on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.gpu import shared_gpu

pytestmark = pytest.mark.timeout(300)
BEGUN, STEPS = 2, 8
JOB = f"""
model: {{card: deepseek-v3, variant: tiny, overrides: {{num_layers: 4}}}}
precision: {{dtype: bf16}}
data: {{source: synthetic, sequence_length: 512}}
train: {{steps: {STEPS}, global_batch_size: 8, micro_batch_size: 2, device: gpu, eval_interval: 0, eval_batches: 1}}
optimizer: {{warmup_steps: 2, learning_rate: 0.001}}
checkpoint: {{save_interval: {BEGUN}, save_at_end: false}}
log: {{tensorboard: false, figure: false, progress: false}}
"""
LAYOUTS = {
    "expert": ["parallel.expert_parallel_size=2"],
    "tensor": ["parallel.tensor_parallel_size=2"],
    "pipeline": ["parallel.pipeline_parallel_size=2"],
    "context": ["parallel.context_parallel_size=2"],
}


def losses(folder: Path, name: str) -> dict[int, float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if record.get("step", 0) > BEGUN and "loss" in record}


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> tuple[Path, dict[str, int]]:
    """The folder of all runs, and the exit code of each layout's. The layouts run at once."""
    folder = tmp_path_factory.mktemp("shared")
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    command = [sys.executable, "-m", "maniple", "train", "job.yaml", "--name", "one", "--nproc", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    begun = folder / "runs" / "one" / "checkpoints" / f"step_{BEGUN:08d}"
    started = {}
    for name, layout in LAYOUTS.items():
        words = ["train", "../job.yaml", "--name", name, f"output_dir={folder}/runs", *layout]
        words += ["--resume", str(begun), "checkpoint.save_interval=0"]
        (folder / name).mkdir()
        started[name] = shared_gpu.start(2, words, folder=folder / name, log=folder / f"{name}.log")
    return folder, {name: shared_gpu.finish(processes, 200) for name, processes in started.items()}


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_ranks_lose_what_one_does(runs, name):
    folder, codes = runs
    assert codes[name] == 0, (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
    one, two = losses(folder, "one"), losses(folder, name)
    assert list(two) == list(one) == list(range(BEGUN + 1, STEPS + 1))
    assert list(two.values()) == pytest.approx(list(one.values()), rel=2e-3)

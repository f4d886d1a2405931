"""Jobs in every recipe on one GPU, as users start them: they learn as in bf16, by kernels and not by the oracle."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(900)
RECIPES = ["fp8", "fp8_block", "mxfp8"]
JOB = """
model:
  card: deepseek-v3
  variant: tiny
  overrides: {hidden_size: 256, dense_ffn_size: 512, moe: {expert_ffn_size: 256}}
precision: {dtype: bf16}
data: {source: synthetic, sequence_length: 512}
train: {steps: 30, global_batch_size: 8, micro_batch_size: 2, device: gpu, eval_interval: 10, eval_batches: 1}
optimizer: {warmup_steps: 5, learning_rate: 0.001}
log: {tensorboard: false, figure: false, progress: false}
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("recipes")
    (root / "job.yaml").write_text(JOB, encoding="utf-8")
    for recipe in ("bf16", *RECIPES):
        words = ["--nproc", "1", "--name", recipe, f"precision.recipe={recipe}"]
        done = subprocess.run(
            [sys.executable, "-m", "maniple", "train", "job.yaml", *words], cwd=root, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return root / "runs"


def losses(run) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.parametrize("recipe", RECIPES)
def test_it_learns_as_in_bf16(runs, recipe):
    usual, got = losses(runs / "bf16"), losses(runs / recipe)
    assert got[0] == pytest.approx(usual[0], rel=1e-2)
    assert got[-1] < got[0] - 0.5
    assert got[-1] == pytest.approx(usual[-1], rel=2e-2)


@pytest.mark.parametrize("recipe", RECIPES)
def test_kernels_ran(runs, recipe):
    assert json.loads((runs / recipe / "summary.json").read_text())["precision"] == {recipe: "0-3"}
    log = (runs / recipe / "logs" / "rank_0.log").read_text(encoding="utf-8")
    said = [line for line in log.splitlines() if "kernels: quantize" in line]
    assert said
    assert not [line for line in said if ": reference (" in line]

"""benchmarks/whole_step.py on a GPU: a real trace has what is read of it, and one full-size layer is measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from maniple.bench import rows, step_trace, whole_step

ROOT = Path(__file__).parents[2]


class Known:
    """A step of twelve products, one copy to the host, and nothing else."""

    name, recipe, note = "known", "bf16", ""

    def __init__(self):
        self.a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
        self.out = torch.empty_like(self.a)

    def step(self):
        for _ in range(12):
            torch.mm(self.a, self.a, out=self.out)
        return self.out[0, 0].item()


def test_a_real_trace(tmp_path):
    known = Known()
    known.step()
    step_trace.record(known.step, 3, torch.device("cuda"), tmp_path / "trace.json")
    found = step_trace.read(tmp_path / "trace.json")
    assert found["steps"] == 3
    assert found["kernels"] >= 12
    assert 1 <= found["copies"] < 14  # the number, and what the library clears before a product
    assert found["launches"] >= 12
    assert 0.5 < found["busy_share"] < 1
    assert sum(found["idle_milliseconds"].values()) == pytest.approx(
        found["idle_share"] * found["step_milliseconds"], rel=1e-6
    )
    assert found["idle_milliseconds"]["after_sync"] > 0
    assert sum(found["syncs"].values()) >= 1
    assert found["top"][0]["number"] == 12
    assert found["top"][0]["share"] > 0.9


def test_waits_are_found_where_they_are():
    waits = whole_step.host_waits(Known())
    assert [place.rsplit(":", 1)[0].endswith("gpu/test_whole_step.py") for place in waits] == [True]
    assert list(waits.values()) == [1]


@pytest.mark.timeout(400)
def test_a_layer_of_full_size_is_measured_beside_transformers(tmp_path):
    out = tmp_path / "rows.jsonl"
    sizes = ["--layers", "1", "--sequence-length", "512", "--micro-batch-size", "1", "--micro-batches", "2"]
    words = [*sizes, "--steps", "3", "--warm-up", "2", "--out", str(out), "--trace", str(tmp_path / "traces")]
    script = ROOT / "benchmarks" / "whole_step.py"
    done = subprocess.run([sys.executable, script, *words], cwd=ROOT, capture_output=True, text=True, timeout=390)
    assert done.returncode == 0, done.stdout + done.stderr
    peer, ours = rows.read(out)
    for row in (peer, ours):
        assert row["not_run"] is None
        # ln 151,936, and half the variance of logits of weights of 0.02 over 2,048 normed numbers
        assert row["first_loss"] == pytest.approx(11.93 + 0.41, abs=0.1)
        assert row["profile"]["steps"] == whole_step.PROFILED
        assert 0 < row["profile"]["busy_share"] <= 1
        # the profiler slows a step down, and nothing else lies between the two times
        assert 0.5 < row["profile"]["step_milliseconds"] / row["milliseconds"] < 3
    # the host waits for the loss and the norm once a step, and in no layer
    waits = {place.rsplit(":", 1)[0] for place in ours["host_waits"]}
    assert waits <= {"maniple/engines/megatron/step.py", "maniple/engines/megatron/optimizer.py"}
    assert [used for used in ours["used_so_far"] if used.startswith("grouped_gemm")]
    assert not [used for used in ours["used_so_far"] if used.startswith("grouped_gemm") and used.endswith("reference")]
    assert len(list((tmp_path / "traces").glob("*.json"))) == 2
    assert "tokens a second over transformers" in done.stdout

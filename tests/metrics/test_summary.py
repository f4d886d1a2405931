import json
import os
import subprocess
import sys

import psutil
import torch

import maniple
from maniple.metrics import environment, write_summary


def test_summary_has_what_a_run_came_to_and_what_it_ran_on(tmp_path):
    path = write_summary(
        tmp_path / "run",
        validation_loss=4.25,
        unigram_entropy=6.5,
        steps=400,
        tokens_per_second_per_gpu=1400.5,
        mfu=float("nan"),
        peak_memory_bytes=123,
        world_size=2,
        device="cpu",
        command=["maniple", "train", "a b.yaml"],
        sample="def f():",
    )
    assert path == tmp_path / "run" / "summary.json"
    summary = json.loads(path.read_text(), parse_constant=lambda word: (_ for _ in ()).throw(ValueError(word)))
    hardware, versions = summary.pop("hardware"), summary.pop("versions")
    assert summary == {
        "validation_loss": 4.25,
        "unigram_entropy": 6.5,
        "steps": 400,
        "tokens_per_second_per_gpu": 1400.5,
        "mfu": None,
        "peak_memory_bytes": 123,
        "world_size": 2,
        "sample": "def f():",
        "command": "maniple train 'a b.yaml'",
        "nonfinite": {"mfu": "nan"},
    }
    assert versions["maniple"] == maniple.__version__
    assert versions["torch"] == torch.__version__
    assert versions["python"] == ".".join(map(str, sys.version_info[:3]))
    assert versions["megatron-core"].startswith("0.19.")
    assert hardware["device"] == "cpu"
    assert hardware["cpu_cores"] == len(os.sched_getaffinity(0))
    assert hardware["memory_bytes"] == psutil.virtual_memory().total
    assert hardware["cpu"]
    assert hardware["gpus"] == []


def test_environment_of_a_cpu_run_does_not_ask_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    assert environment("cpu")["hardware"]["gpus"] == []


def test_peak_memory_follows_what_the_process_held():
    """In a process of its own: this one may have held more before, and a peak does not come down."""
    code = """
from maniple.metrics.summary import _peak_resident_bytes as peak
before = peak()
block = bytearray(b"x" * (64 << 20))
held = peak()
del block
print(held - before, peak() - before)
"""
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    held, after = map(int, child.stdout.split())
    assert held > 32 << 20
    assert after >= held


def test_peak_memory_of_a_worker_is_its_own():
    """getrusage would hand a child its parent's peak, which a launcher's or a test runner's size would falsify."""
    block = bytearray(b"x" * (256 << 20))
    code = "from maniple.metrics.summary import _peak_resident_bytes as peak; print(peak())"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert 10 << 20 < int(child.stdout) < len(block)

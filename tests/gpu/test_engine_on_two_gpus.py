"""Jobs on two GPUs through NCCL, as users start them: layouts, bits, a kill, a hang, a signal. All run at once."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
LIMIT = 15  # seconds that a collective may take in the job that hangs
JOB = """
model: {card: deepseek-v3, variant: tiny, overrides: {num_layers: 4}}
precision: {dtype: bf16}
data: {source: synthetic, sequence_length: 512}
train: {steps: 24, global_batch_size: 8, micro_batch_size: 2, device: gpu, eval_interval: 0, eval_batches: 1}
optimizer: {warmup_steps: 2, learning_rate: 0.001}
checkpoint: {save_interval: 6}
log: {tensorboard: false, figure: false, progress: false}
"""
EP2 = ("--nproc", "2", "parallel.expert_parallel_size=2")
EXACT = "train.deterministic=true"
JOBS = {
    "one": ("--nproc", "1", EXACT),
    "again": ("--nproc", "1", EXACT),
    "context": ("--nproc", "2", "parallel.context_parallel_size=2"),
    "calm": (*EP2, EXACT),
    "bounded": (*EP2, EXACT, "moe.buffer_factor=1.0", "moe.pages_factor=1.0"),
    "killed": (*EP2, EXACT, "--max-restarts", "1"),
    "hung": (*EP2, "train.steps=100000", f"parallel.collective_timeout_seconds={LIMIT}"),
    "asked": (*EP2, "train.steps=100000"),
}


@dataclass
class Run:
    folder: Path
    process: subprocess.Popen
    log: Path
    code: int | None = None

    def losses(self) -> dict[int, float]:
        try:
            lines = (self.folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        records = [json.loads(line) for line in lines if line.endswith("}")]
        return {record["step"]: record["loss"] for record in records if "loss" in record}

    def last_rank(self) -> psutil.Process:
        ranks = [p for p in psutil.Process(self.process.pid).children() if "maniple" in " ".join(p.cmdline())]
        return ranks[-1]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Run]:
    root = tmp_path_factory.mktemp("gpus")
    (root / "job.yaml").write_text(JOB, encoding="utf-8")
    found = {}
    for name, words in JOBS.items():
        log = root / f"{name}.log"
        with log.open("wb") as file:
            command = [sys.executable, "-m", "maniple", "train", "job.yaml", "--name", name, *words]
            process = subprocess.Popen(command, cwd=root, stdout=file, stderr=subprocess.STDOUT)
        found[name] = Run(root / "runs" / name, process, log)
    waiting = {
        "killed": (14, lambda run: run.last_rank().kill()),
        "hung": (8, lambda run: run.last_rank().suspend()),
        "asked": (8, lambda run: run.process.send_signal(signal.SIGTERM)),
    }
    end = time.monotonic() + 600
    while time.monotonic() < end and any(run.process.poll() is None for run in found.values()):
        for name, (step, act) in list(waiting.items()):
            if max(found[name].losses(), default=0) >= step:
                act(found[name])
                del waiting[name]
        time.sleep(0.2)
    for run in found.values():
        for process in (
            (*psutil.Process(run.process.pid).children(recursive=True),) if run.process.poll() is None else ()
        ):
            process.kill()
        run.process.kill()
        run.code = run.process.wait()
    return found


def said(run: Run) -> str:
    return run.log.read_text(encoding="utf-8", errors="replace")


@pytest.mark.parametrize("name", ["one", "again", "context", "calm", "bounded", "killed"])
def test_jobs_come_to_their_end(runs, name):
    assert runs[name].code == 0, said(runs[name])
    assert list(runs[name].losses()) == list(range(1, 25))


def test_deterministic_runs_are_equal_bit_for_bit(runs):
    assert runs["one"].losses() == runs["again"].losses()


def test_context_parallelism_changes_no_loss(runs):
    assert list(runs["context"].losses().values()) == pytest.approx(list(runs["one"].losses().values()), rel=2e-3)


def test_bounded_buffers_change_no_loss(runs):
    assert list(runs["bounded"].losses().values()) == pytest.approx(list(runs["calm"].losses().values()), rel=2e-3)
    assert "run again with larger buffers" in said(runs["bounded"])


def test_a_killed_rank_is_started_again_and_no_bit_is_lost(runs):
    assert "SIGKILL" in said(runs["killed"])
    assert runs["killed"].losses() == runs["calm"].losses()


def test_a_hang_ends_and_names_the_rank(runs):
    assert runs["hung"].code == 124
    assert "rank 1 has not answered" in said(runs["hung"])


def test_sigterm_saves_and_ends_well(runs):
    assert runs["asked"].code == 0, said(runs["asked"])
    last = max(runs["asked"].losses())
    assert (runs["asked"].folder / "checkpoints" / f"step_{last:08d}" / "maniple.json").is_file()


def test_checkpoints_are_whole(runs):
    command = [sys.executable, "-m", "maniple", "checkpoint", "verify", str(runs["calm"].folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("whole") == 4

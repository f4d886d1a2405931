"""Jobs started by `maniple train`, for tests that do them harm: where each rank is, and how to hit it there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from maniple.metrics import pulse
from maniple.metrics.pulse import Place

START_SECONDS = 240.0  # until a rank is where it is waited for: importing Megatron-Core takes long on a busy machine
END_SECONDS = 240.0
JOB = """
extends: laptop
model: {card: qwen3-30b-a3b, variant: tiny, vocab_size_multiple: 1, overrides: {vocab_size: 300}}
precision: {dtype: fp32}
data: {source: synthetic, sequence_length: 16, tokenizer_vocab_size: 300}
parallel: {collective_timeout_seconds: 120}
optimizer: {warmup_steps: 0}
train: {device: cpu, steps: 30, micro_batch_size: 1, global_batch_size: 4, eval_interval: 0, eval_batches: 1}
checkpoint: {save_interval: 5}
log: {tensorboard: false, figure: false, progress: false}
"""


class Job:
    """A run's folder and its lives. `words` follow `maniple train job.yaml`."""

    def __init__(self, folder: Path, name: str, *words: str) -> None:
        self.folder, self.name, self.words = folder, name, words
        self.run_dir = folder / "runs" / name
        (folder / "job.yaml").write_text(JOB, encoding="utf-8")

    @contextmanager
    def started(self, *more: str, node: str = "", **environment: str) -> Iterator[Life]:
        """A launcher, which is killed with its ranks if it has not ended at the end of the block."""
        inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
        command = [sys.executable, "-m", "maniple", "train", "job.yaml", *self.words, *more, "--name", self.name]
        log = self.folder / f"{self.name}{node}.log"
        # where the launcher's own folder, with the pulses, comes to lie; pytest's is too long for the loaders' sockets
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as scratch:
            with open(log, "w", encoding="utf-8") as output:
                process = subprocess.Popen(
                    command,
                    cwd=self.folder,
                    env=inherited | {"TMPDIR": scratch, "OMP_NUM_THREADS": "1"} | environment,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            life = Life(process, log, Path(scratch))
            try:
                yield life
            finally:
                life.kill()

    def run(self, *more: str) -> Life:
        """A whole life; it has to end well."""
        with self.started(*more) as life:
            assert life.end() == 0, life.said()
        return life

    def records(self) -> list[dict[str, Any]]:
        lines = (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def curve(self) -> list[tuple]:
        """Step, loss, gradient norm and expert counts of every training record."""
        return [(r["step"], r["loss"], r["grad_norm"], r["expert_counts"]) for r in self.records() if "loss" in r]

    def saved(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.run_dir / "checkpoints").glob("step_????????"))

    def tensors(self, step: int) -> dict[str, bytes]:
        """The files of a checkpoint that hold its tensors."""
        folder = self.run_dir / "checkpoints" / f"step_{step:08d}"
        found = {path.name: path.read_bytes() for path in folder.glob("*.distcp")}
        assert found
        return found


class Life:
    """One launcher and the ranks that it starts."""

    def __init__(self, process: subprocess.Popen, log: Path, scratch: Path) -> None:
        self.process, self._log, self._scratch = process, log, scratch

    def said(self) -> str:
        return self._log.read_text(encoding="utf-8")

    def wait_for(self, rank: int, phase: str, step: int, *, after: int = 0) -> Place:
        """Where the rank is, once it is in that phase of that step or a later one. after: not as that process."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            near = False
            for path in self._scratch.glob(f"maniple-*/rank_{rank}"):
                with suppress(OSError, IndexError, ValueError):
                    place = pulse.read(path.parent, rank, int.from_bytes(path.read_bytes()[:8], "little"))
                    if place and place.pid != after:
                        near = place.step >= step - 5
                        if place.step >= step and place.phase == phase:
                            return place
            time.sleep(0.0005 if near else 0.02)
        raise AssertionError(f"rank {rank} was never in {phase} of step {step}:\n{self.said()}")

    def reach(self, step: int) -> None:
        """Waits until a rank of this node is at that step."""
        end = time.monotonic() + START_SECONDS
        while time.monotonic() < end and self.process.poll() is None:
            for path in self._scratch.glob("maniple-*/rank_*"):
                with suppress(OSError, ValueError):
                    if int.from_bytes(path.read_bytes()[8:16], "little") >= step:
                        return
            time.sleep(0.01)
        raise AssertionError(f"no rank came to step {step}:\n{self.said()}")

    def hit(self, rank: int, phase: str, step: int, number: int = signal.SIGKILL, *, after: int = 0) -> Place:
        place = self.wait_for(rank, phase, step, after=after)
        os.kill(place.pid, number)
        return place

    def end(self) -> int:
        """The exit code of the launcher. Nothing that it started is left."""
        known = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        code = self.process.wait(timeout=END_SECONDS)
        _, alive = psutil.wait_procs(known, timeout=15)
        assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
        return code

    def kill(self) -> None:
        with suppress(psutil.NoSuchProcess):
            for process in [*psutil.Process(self.process.pid).children(recursive=True), self.process]:
                with suppress(psutil.NoSuchProcess, ProcessLookupError):
                    process.kill()
        self.process.wait()


@contextmanager
def paused(pid: int) -> Iterator[None]:
    """The process does nothing inside: what it has asked others for can be found before it asks for more."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def loader_of(pid: int) -> psutil.Process:
    """The process that reads data for a rank."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for child in psutil.Process(pid).children():
            with suppress(psutil.NoSuchProcess):
                if child.cmdline() == psutil.Process(pid).cmdline():  # forked, and not another program
                    return child
        time.sleep(0.01)
    raise AssertionError(f"process {pid} has no loader")

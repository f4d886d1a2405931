"""A job whose time is up, by its own limit or by Slurm's, saves and ends with 0; the next one goes on from there."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from tests.faults.launched import Job

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]
MANY = "train.steps=100000"
LATER = str(int(time.time()) + 100_000)  # an end of the Slurm job that is far away


def test_minutes_then_slurms_end_then_its_signal(tmp_path):
    """Three lives of one job; all of its steps are there once."""
    job = Job(tmp_path, "late", "--nproc", "2", MANY, "checkpoint.save_interval=0", "--resume", "auto")
    ends = [_end(job, "train.max_minutes=0.02", SLURM_JOB_END_TIME=LATER)]

    soon = str(int(time.time()) + 200)  # the job is to end 199 seconds before it: while it starts, at the latest
    ends.append(_end(job, "train.stop_grace_seconds=199", SLURM_JOB_END_TIME=soon))

    with job.started(SLURM_JOB_END_TIME=LATER) as life:
        life.wait_for(0, "forward", ends[-1] + 5)
        os.kill(life.process.pid, signal.SIGUSR1)  # as of sbatch --signal=B:USR1@300, and of srun's own
        assert life.end() == 0, life.said()
        assert "SIGUSR1: saving at the end of this step, then stopping" in life.said()
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert summary["stopped"] == "asked by SIGUSR1"
    last = job.saved()[-1]
    assert ends[1] == ends[0] + 1, "it was late when its first step ended"
    assert last >= ends[1] + 5
    assert [record[0] for record in job.curve()] == list(range(1, last + 1))


def _end(job: Job, *words: str, **environment: str) -> int:
    """The step at which a job ended since its time was up; it is saved."""
    with job.started(*words, **environment) as life:
        assert life.end() == 0, life.said()
        step = job.saved()[-1]
        assert f"stopped after step {step} (its time is up); go on with --resume auto" in life.said()
    assert json.loads((job.run_dir / "summary.json").read_text())["stopped"] == "its time is up"
    return step

"""A rank that is stopped, and one that waits for what never comes: the job ends by its timeout and names it."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest
from tests.faults.launched import Job, loader_of

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]
LIMIT = 15  # seconds


def test_the_missing_rank_is_named(tmp_path):
    words = ("--nproc", "2", "parallel.expert_parallel_size=2", "data.num_workers=1", "train.steps=100000")
    job = Job(tmp_path, "hang", *words, f"parallel.collective_timeout_seconds={LIMIT}")
    with job.started("--max-restarts", "1") as life:
        reading = life.wait_for(1, "forward", 6)
        loader_of(reading.pid).send_signal(signal.SIGSTOP)  # as if the file system hung; the rank itself lives
        stopped = life.wait_for(1, "forward", 1, after=reading.pid)
        os.kill(stopped.pid, signal.SIGSTOP)
        started = time.monotonic()
        code = life.end()
        seconds = time.monotonic() - started
        said = life.said()
    assert code == 124, said
    first, second = re.findall(r"maniple: (step .*)", said)
    assert re.match(
        r"step (\d+): rank 1 stopped in data loading \d+ s ago; rank 0 waits in \w+.* · 1 restart",
        first,
    )
    assert re.match(r"step \d+: rank 1 has not answered for \d+ s \(last in \w+.*\); rank 0 waits in \w+", second)
    assert seconds < LIMIT + 30

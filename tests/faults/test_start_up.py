"""A rank or a node that never comes: the start ends by its timeout and names who is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.faults.launched import JOB

import maniple

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
LIMIT = 25  # seconds: importing the engine is within them


def held(folder: Path, where: str, *words: str) -> tuple[int, str, float]:
    """Exit code, output and seconds of a job whose rank 1 is held."""
    (folder / "job.yaml").write_text(JOB, encoding="utf-8")
    path = os.pathsep.join([str(Path(maniple.__file__).parents[1]), str(HERE)])
    facts = {"HELD_RANK": "1", "HELD_AT": where, "START_SECONDS": str(LIMIT), "PYTHONPATH": path}
    inherited = {k: v for k, v in os.environ.items() if k not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    command = [sys.executable, str(HERE / "held_job.py"), "train", "job.yaml", "--nproc", "2"]
    command += [f"parallel.collective_timeout_seconds={LIMIT}", *words]
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=inherited | facts | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=400,
    )
    return done.returncode, done.stdout, time.monotonic() - started


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ("import", r"maniple: start-up: rank 1 never joined \(1 of 2 did\); rank 0 waits in meeting"),
        ("meeting", r"maniple: start-up: rank 1 stopped in start-up \d+ s ago; rank 0 waits in meeting"),
    ],
)
def test_a_rank_that_does_not_come_is_named(tmp_path, where, said):
    code, output, seconds = held(tmp_path, where)
    assert code == 124, output
    assert re.fullmatch(said, output.splitlines()[-1]), output
    assert seconds < LIMIT + 90

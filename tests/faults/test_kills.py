"""One run that is killed in a step, stopped by SIGTERM, killed while it saves and while it reads: its curve is bit for
bit that of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass, field

import pytest
from tests.faults.launched import Job, loader_of, paused

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1500)]

WORDS = ("--nproc", "2", "parallel.expert_parallel_size=2", "data.num_workers=1")


@dataclass
class Story:
    calm: Job
    run: Job
    said: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    saved: dict[str, list[int]] = field(default_factory=dict)


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp("kills")
    tale = Story(Job(folder, "calm", *WORDS), Job(folder, "hit", *WORDS))
    tale.calm.run()

    with tale.run.started() as life:  # 1. killed in a step
        life.hit(1, "forward", 7)
        started = time.monotonic()
        tale.codes["step"] = life.end()
        tale.seconds = time.monotonic() - started
        tale.said["step"], tale.saved["step"] = life.said(), tale.run.saved()

    with tale.run.started("--resume", "auto") as life:  # 2. asked to stop
        life.wait_for(0, "forward", 12)
        os.kill(life.process.pid, signal.SIGTERM)
        tale.codes["stop"] = life.end()
        tale.said["stop"], tale.saved["stop"] = life.said(), tale.run.saved()

    with tale.run.started("--resume", "auto", "--max-restarts", "3") as life:
        gone = life.hit(0, "saving", 20)  # 3. killed while it saves
        gone = life.wait_for(1, "forward", 22, after=gone.pid)
        with paused(gone.pid):  # so that it has not read all by then
            loader_of(gone.pid).kill()  # 4. what reads for it is killed
        gone = life.wait_for(1, "forward", 24, after=gone.pid)
        with paused(loader_of(gone.pid).pid):
            life.hit(1, "data loading", 24)  # 5. killed while it waits for what is read
        tale.codes["save"] = life.end()
        tale.said["save"] = life.said()
    return tale


def test_the_curve_is_that_of_a_calm_run(story):
    assert len(story.calm.curve()) == 30
    assert story.run.curve() == story.calm.curve()


def test_the_weights_are_those_of_a_calm_run(story):
    assert story.run.tensors(30) == story.calm.tensors(30)


def test_a_kill_ends_the_job_with_its_reason(story):
    assert story.codes["step"] == 128 + signal.SIGKILL
    last = story.said["step"].splitlines()[-1]
    assert re.fullmatch(r"maniple: rank 1 was ended by signal 9 \(SIGKILL\) in step \d+, forward", last), story.said[
        "step"
    ]
    assert "Traceback" not in story.said["step"]
    assert story.seconds < 30


def test_sigterm_saves_and_ends_well(story):
    assert story.codes["stop"] == 0, story.said["stop"]
    (new,) = [step for step in story.saved["stop"] if step % 5 and step > 10]
    assert f"stopped after step {new} (asked by a signal); go on with --resume auto" in story.said["stop"]
    assert "validation loss" not in story.said["stop"]


def test_restarts_mend_what_was_killed(story):
    assert story.codes["save"] == 0, story.said["save"]
    assert re.search(
        r"rank 0 was ended by signal 9 \(SIGKILL\) in step 20, saving · 3 restarts left", story.said["save"]
    )
    assert re.search(
        r"rank 1 failed in step \d+, .*(DataLoader worker|loader process) .* · 2 restarts left", story.said["save"]
    )
    assert re.search(
        r"rank 1 was ended by signal 9 \(SIGKILL\) in step \d+, data loading · 1 restart left", story.said["save"]
    )
    assert not list((story.run.run_dir / "checkpoints").glob("*.partial"))


def test_the_summary_has_the_launchers_command(story):
    summary = json.loads((story.run.run_dir / "summary.json").read_text())
    assert summary["command"].startswith("maniple train job.yaml --nproc 2 ")
    assert summary["stopped"] is None

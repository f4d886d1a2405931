"""One run that is killed while it saves and while it reads, stopped by SIGTERM, and killed in a step: its curve is bit
for bit that of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from dataclasses import dataclass, field

import pytest
from tests.faults.launched import Job, Life, loader_of, paused

from maniple.engines.megatron.checkpoint import files

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1500)]

WORDS = ("--nproc", "2", "parallel.expert_parallel_size=2", "data.num_workers=1")


@dataclass
class Story:
    calm: Job
    run: Job
    said: dict[str, str] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)  # from a kill to the launcher's end
    saved: dict[str, list[int]] = field(default_factory=dict)
    damaged: dict[str, list[str]] = field(default_factory=dict)

    def ends(self, place: str, life: Life, killed: float | None = None) -> None:
        """Waits for the end of a life and notes how it ended, and what it left."""
        self.codes[place] = life.end()
        if killed is not None:
            self.seconds[place] = time.monotonic() - killed
        self.said[place], self.saved[place] = life.said(), self.run.saved()
        self.damaged[place] = [str(error) for error in files.newest_first(files.all_of(self.run.run_dir))[1]]


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> Story:
    folder = tmp_path_factory.mktemp("kills")
    tale = Story(Job(folder, "calm", *WORDS), Job(folder, "hit", *WORDS))
    tale.calm.run()

    with tale.run.started() as life:  # 1. a rank that does not name checkpoints is killed while it saves one
        life.hit(1, "saving", 10)
        tale.ends("saving", life, time.monotonic())

    with tale.run.started("--resume", "auto") as life:  # 2. killed while it waits for what is read
        waiting = life.wait_for(0, "forward", 12)
        with paused(loader_of(waiting.pid).pid):
            life.hit(0, "data loading", 12)
            tale.ends("data loading", life, time.monotonic())

    with tale.run.started("--resume", "auto") as life:  # 3. asked to stop
        life.wait_for(0, "forward", 12)
        os.kill(life.process.pid, signal.SIGTERM)
        tale.ends("stop", life)

    with tale.run.started("--resume", "auto", "--max-restarts", "3") as life:
        gone = life.hit(0, "saving", 20)  # 4. the rank that names checkpoints is killed while it saves one
        gone = life.wait_for(1, "forward", 22, after=gone.pid)
        with paused(gone.pid):  # so that it has not read all by then
            loader_of(gone.pid).kill()  # 5. what reads for it is killed
        life.hit(1, "forward", 24, after=gone.pid)  # 6. killed in a step
        tale.ends("restarted", life)
    return tale


def test_the_curve_is_that_of_a_calm_run(story):
    assert len(story.calm.curve()) == 30
    assert story.run.curve() == story.calm.curve()


def test_the_weights_are_those_of_a_calm_run(story):
    assert story.run.tensors(30) == story.calm.tensors(30)


@pytest.mark.parametrize(("rank", "place"), [(1, "saving"), (0, "data loading")])
def test_a_kill_ends_the_job_with_its_reason(story, rank, place):
    said = story.said[place]
    assert story.codes[place] == 128 + signal.SIGKILL, said
    assert story.seconds[place] < 30
    (reason,) = [line for line in said.splitlines() if re.search(r"\b(rank \d|Error|Exception)\b", line)]
    assert re.fullmatch(rf"maniple: rank {rank} was ended by signal 9 \(SIGKILL\) in step \d+, {place}", reason), said
    assert said.splitlines()[-2:] == [reason, f"maniple: go on with --resume auto (step {story.saved[place][-1]})"]
    assert "Traceback" not in said


@pytest.mark.parametrize("place", ["saving", "data loading", "restarted"])
def test_a_kill_leaves_whole_checkpoints(story, place):
    assert 5 in story.saved[place]
    assert story.damaged[place] == []


def test_sigterm_saves_and_ends_well(story):
    assert story.codes["stop"] == 0, story.said["stop"]
    (new,) = [step for step in story.saved["stop"] if step % 5 and step > 10]
    assert f"stopped after step {new} (asked by SIGTERM); go on with --resume auto" in story.said["stop"]
    assert "validation loss" not in story.said["stop"]


def test_restarts_mend_what_was_killed(story):
    said = story.said["restarted"]
    assert story.codes["restarted"] == 0, said
    assert re.search(r"rank 0 was ended by signal 9 \(SIGKILL\) in step 20, saving · 3 restarts left", said)
    assert re.search(r"rank 1 failed in step \d+, .*(DataLoader worker|loader process) .* · 2 restarts left", said)
    assert re.search(r"rank 1 was ended by signal 9 \(SIGKILL\) in step \d+, forward · 1 restart left", said)
    assert not list((story.run.run_dir / "checkpoints").glob("*.partial"))


def test_the_summary_has_the_launchers_command(story):
    summary = json.loads((story.run.run_dir / "summary.json").read_text())
    assert summary["command"].startswith("maniple train job.yaml --nproc 2 ")
    assert summary["stopped"] is None

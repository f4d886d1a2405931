"""Which checkpoint a job begins with, and goes on from when its processes are started again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.distributed_utils import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def _choices(rank: int, world: int, folder: Path) -> dict[str, str | None]:
    import torch
    from tests.engines import jobs

    from maniple.engines.megatron.faults import recovery

    def steps(count: int, **checkpoint) -> None:
        sections = {"train": {"steps": count}, "checkpoint": {"save_at_end": True, **checkpoint}}
        jobs.run(jobs.make_job(folder, "run", **sections), jobs.tiny_card("qwen3-30b-a3b"))

    def point(*, restarted: bool, resume: str | None = None) -> str | None:
        job = jobs.make_job(folder, "run", checkpoint={"resume": resume})
        found = recovery.starting_point(job, torch.device("cpu"), restarted=restarted)
        return None if found is None else found.name

    found = {"nothing there, again": point(restarted=True)}
    steps(2)
    found["after its own"] = point(restarted=True)
    found["asked for auto"] = point(restarted=False, resume="auto")
    # a new job of that name begins, and dies before it has saved anything
    found["anew"] = point(restarted=False)
    (folder / "run").mkdir(exist_ok=True)
    time.sleep(0.01)
    recovery.begin(jobs.make_job(folder, "run"), resumed=None)
    found["the former job's"] = point(restarted=True)
    found["the one it was given"] = point(restarted=True, resume=str(folder / "run" / "checkpoints" / "step_00000002"))
    steps(1)
    found["its own again"] = point(restarted=True)
    return found


def test_a_restart_goes_on_from_this_jobs_own(tmp_path):
    (found,) = run_ranks(_choices, 1, tmp_path)
    assert found == {
        "nothing there, again": None,
        "after its own": "step_00000002",
        "asked for auto": "step_00000002",
        "anew": None,
        "the former job's": None,
        "the one it was given": "step_00000002",
        "its own again": "step_00000001",
    }

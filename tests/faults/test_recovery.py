"""Which checkpoint a job begins with, and goes on from when its processes are started again."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from tests.distributed_utils import run_ranks

EARLIER = (
    "holds an earlier run up to step 2; starting anew overwrites its checkpoints as it passes them; --resume auto goes "
    "on from it"
)
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(600)]


def _choices(rank: int, world: int, folder: Path) -> dict[str, Any]:
    import torch
    from tests.engines import jobs

    from maniple.engines.megatron import trainer
    from maniple.engines.megatron.checkpoint import files
    from maniple.engines.megatron.faults import recovery
    from maniple.errors import UserError
    from maniple.metrics import writer
    from maniple.metrics.folder import RunLock

    def steps(count: int, **checkpoint) -> None:
        sections = {"train": {"steps": count, "eval_interval": 1}, "log": {"progress": True}}
        sections["checkpoint"] = {"save_at_end": True, **checkpoint}
        jobs.run(jobs.make_job(folder, "run", **sections), jobs.tiny_card("qwen3-30b-a3b"))

    def point(*, restarted: bool, resume: str | None = None) -> str | None:
        job = jobs.make_job(folder, "run", checkpoint={"resume": resume})
        found = recovery.starting_point(job, torch.device("cpu"), restarted=restarted)
        return None if found is None else found.name

    screen = writer.console.file = io.StringIO()
    found = {"nothing there, again": point(restarted=True)}
    steps(2)
    found["validations"] = [
        line.rpartition(" ")[0] for line in screen.getvalue().splitlines() if "validation loss" in line
    ]
    found["after its own"] = point(restarted=True)
    found["asked for auto"] = point(restarted=False, resume="auto")
    # a new job of that name begins, and dies before it has saved anything
    found["anew"] = point(restarted=False)
    (folder / "run").mkdir(exist_ok=True)
    recovery.begin(jobs.make_job(folder, "run"), resumed=None)
    found["the former job's"] = point(restarted=True)
    found["the one it was given"] = point(restarted=True, resume=str(folder / "run" / "checkpoints" / "step_00000002"))
    steps(1)
    found["its own again"] = point(restarted=True)
    # a second start of the name while the job is there is refused, and takes nothing from it
    lock = RunLock(folder / "run")
    try:
        steps(2)
    except UserError as error:
        found["another"] = str(error).partition(": ")[2]
    lock.close()
    found["after the refusal"] = point(restarted=True)
    steps(3, keep=1)  # the other two are not its own
    saved = sorted((folder / "run" / "checkpoints").iterdir())
    found["in order of saving"] = [(at.name[-1], files.read_manifest(at)["sequence"]) for at in saved]
    summary = (folder / "run" / "summary.json").read_text()
    steps(3, resume="auto")
    found["its summary stays"] = (folder / "run" / "summary.json").read_text() == summary
    log = (folder / "run" / "logs" / "rank_0.log").read_text()
    found["said"] = [
        log.count("2 checkpoints of another start of this run stay and are not counted by checkpoint.keep: step_"),
        log.count("train.steps is 3: no step is left; set more to go on"),
        [line.partition(f"{folder}/run ")[2] for line in log.splitlines() if "an earlier run" in line],
    ]
    (folder / "file").touch()
    with jobs.no_process_group():
        try:
            trainer.main(jobs.make_job(folder / "file", "run"), jobs.tiny_card("qwen3-30b-a3b"))
        except UserError as error:
            found["a file in its folder's place"] = str(error).partition(": ")[2]
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
        "another": "another job is writing this run; wait for its end, or give a new --name",
        "after the refusal": "step_00000001",
        "in order of saving": [("1", 2), ("2", 1), ("3", 3)],
        "a file in its folder's place": "Not a directory; mend that, or set output_dir",
        "validations": ["step 1 · validation loss"],
        "its summary stays": True,
        "said": [1, 1, [EARLIER, EARLIER]],
    }

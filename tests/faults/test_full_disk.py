"""A disk without room: files of a run lead to `/dev/full`, where the system refuses every byte as a full disk does."""

from __future__ import annotations

import builtins
import io
import os
from pathlib import Path
from typing import Any

import pytest
from tests.distributed_utils import run_ranks

from maniple.engines.megatron.checkpoint import files

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full"),
]
STEPS = 5
FULL = {
    2: "__1_",
    3: ".metadata",
    4: files.MANIFEST,
}  # step -> how the file's name begins that finds no room in its save


def full(rank: int, world_size: int, folder: Path) -> dict[str, Any]:
    """A run that saves after each step; no record and no line of rank 0's log is ever written."""
    from tests.engines import jobs

    from maniple.engines.megatron import parallel, trainer
    from maniple.metrics import writer

    job = jobs.make_job(
        folder,
        "full",
        parallel={"expert_parallel_size": world_size, "distributed_optimizer": True},
        train={"steps": STEPS},
        checkpoint={"save_interval": 1, "save_at_end": True},
    )
    if rank == 0:
        (job.run_dir / "logs").mkdir(parents=True)
        for name in ("metrics.jsonl", "logs/rank_0.log"):
            (job.run_dir / name).symlink_to("/dev/full")
    screen = writer.console.file = io.StringIO()
    real = builtins.open

    def on_the_full_disk(file, mode="r", *args, **options):
        path = Path(os.fsdecode(file)) if isinstance(file, str | os.PathLike) else Path()
        if path.parent.suffix == files.PARTIAL and set(mode) & set("wxa"):
            start = FULL.get(int(path.parent.stem.removeprefix("step_")))
            if start is not None and path.name.startswith(start):
                return real("/dev/full", mode.replace("x", "w"), *args, **options)
        return real(file, mode, *args, **options)

    device = parallel.pick_device(job)
    parallel.start(job, device)
    it = trainer.Trainer(job, jobs.tiny_card("deepseek-v3", num_layers=2), device)
    found: list[tuple[list[str], list[str]]] = []  # before each save: the names in the folder, what is wrong with one
    save = it.saver.save

    def look_and_save(*args, **options):
        it.saver.wait()
        if (job.run_dir / "checkpoints").exists():
            names = sorted(path.name for path in (job.run_dir / "checkpoints").iterdir())
            found.append((names, list(map(str, files.newest_first(files.all_of(job.run_dir))[1]))))
        return save(*args, **options)

    it.saver.save = look_and_save
    builtins.open = io.open = on_the_full_disk
    try:
        it.run()
    finally:
        builtins.open = io.open = real
        parallel.stop_groups()
    return {"steps": it.progress.step, "found": found, "screen": screen.getvalue().splitlines()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def ranks(folder) -> list[dict[str, Any]]:
    return run_ranks(full, 2, folder, timeout=300)


def test_the_run_goes_on_to_its_end(ranks, folder):
    assert [rank["steps"] for rank in ranks] == [STEPS, STEPS]
    assert (folder / "full" / "summary.json").stat().st_size  # it was written where there is room
    assert not os.path.getsize(folder / "full" / "metrics.jsonl")


def test_the_last_good_checkpoint_stays_and_nothing_half_written(ranks, folder):
    (*before, after_all_failures) = ranks[0]["found"]
    assert [names for names, _ in before] == [["step_00000001"]] * (STEPS - 2)
    assert after_all_failures == (["step_00000001"], [])
    assert not [wrong for _, wrong in before if wrong]
    whole, wrong = files.newest_first(files.all_of(folder / "full"))
    assert [path.name for path, _ in whole] == ["step_00000005", "step_00000001"]
    assert not wrong
    for path, manifest in whole:
        files.check_digests(path, manifest)


def test_each_problem_is_one_line_on_the_screen(ranks):
    screen, other = ranks[0]["screen"], ranks[1]["screen"]
    said = [line for line in screen if "No space left on device" in line]
    assert len(said) == 2 + len(FULL), screen
    assert len([line for line in said if "/full: No space left on device: records of this run" in line]) == 1
    assert len([line for line in said if "rank_0.log: No space left on device: lines of this log" in line]) == 1
    for step in FULL:
        wanted = f"warning: the checkpoint of step {step} cannot be written: No space left on device"
        (line,) = [line for line in said if line.startswith(wanted)]
        assert line.endswith("make room, or mend it; training goes on")
    assert "Traceback" not in "\n".join(screen + other)
    assert not other

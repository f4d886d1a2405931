"""A process that has run jobs one after another keeps nothing of them: no group, and so no thread."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.distributed_utils import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]


def threads_after_jobs(rank: int, world_size: int, folder: Path) -> dict[str, list[int]]:
    import gc
    import os

    from tests.engines import jobs

    found: dict[str, list[int]] = {}
    for name in ("qwen3-30b-a3b", "deepseek-v3"):  # plain rotary embeddings, and YaRN's
        card, counts = jobs.tiny_card(name), found.setdefault(name, [])
        for _ in range(3):
            jobs.run(jobs.make_job(folder, "job", train={"steps": 1}), card)
            gc.collect()
            counts.append(len(os.listdir("/proc/self/task")))
    return found


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted under /proc")
def test_threads_do_not_grow_with_jobs(tmp_path):
    (found,) = run_ranks(threads_after_jobs, 1, tmp_path, timeout=300)
    first, second, third = found["qwen3-30b-a3b"]
    assert first == second == third
    assert found["deepseek-v3"] == [first] * 3

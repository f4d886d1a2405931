"""A long run with a kill, a restart and a change of layout, against one that nothing happened to."""

from __future__ import annotations

import os
import signal

import pytest
from tests.faults.launched import Job

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(1800)]
STEPS, CHANGE = 1700, 1500
WORDS = (
    *("--nproc", "2", f"train.steps={STEPS}", "train.global_batch_size=2", "data.sequence_length=8"),
    *("checkpoint.save_interval=250", "checkpoint.keep=3", "optimizer.learning_rate=1e-3"),
    "model.overrides={vocab_size: 300, num_layers: 1, hidden_size: 16, num_heads: 2, num_kv_heads: 1, head_dim: 8}",
)


def test_a_long_life_loses_nothing(tmp_path):
    calm = Job(tmp_path, "calm", *WORDS, "parallel.expert_parallel_size=2")
    calm.run()
    job = Job(tmp_path, "hit", *WORDS)
    with job.started("parallel.expert_parallel_size=2", "--max-restarts", "1") as life:
        life.hit(1, "backward", 520)
        life.wait_for(0, "backward", CHANGE)
        os.kill(life.process.pid, signal.SIGTERM)
        assert life.end() == 0, life.said()
        assert "restarting 2 of 2 processes" in life.said()
    changed = max(job.saved())
    assert CHANGE <= changed < STEPS
    job.run("parallel.expert_parallel_size=1", "--resume", "auto")

    ours, theirs = job.curve(), calm.curve()
    assert [record[0] for record in ours] == list(range(1, STEPS + 1))
    assert ours[:changed] == theirs[:changed]  # losses, norms and counts, bit for bit
    for (_, loss, _, _), (_, other, _, _) in zip(ours[changed:], theirs[changed:], strict=True):
        assert loss == pytest.approx(other, rel=1e-5)
    assert max(job.saved()) == STEPS

"""Two launchers as two nodes; one is killed with its rank. The other goes on alone, with the same global batch."""

from __future__ import annotations

import socket
import time

import pytest
from tests.faults.launched import START_SECONDS, Job

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


def test_a_run_goes_on_with_fewer_nodes(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    calm = Job(tmp_path, "calm", "--nproc", "2", "train.steps=16")
    calm.run()
    conf = "last_call_timeout=3,keep_alive_interval=1,join_timeout=200"
    meeting = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a", "--rdzv-conf", conf)
    words = ("--nproc", "1", "train.steps=16", "--nnodes", "1:2", *meeting, "--max-restarts", "3")
    job = Job(tmp_path, "lost", *words)
    with job.started(node="-a") as stays:
        _wait_until_open(port)  # the nodes meet at the one that is there first, and it has to stay
        with job.started(node="-b") as goes:
            goes.reach(8)
            goes.kill()
        code = stays.end()
        said = stays.said()
    assert code == 0, said
    assert "restarting 1 of 1 processes" in said, said
    ours, theirs = job.curve(), calm.curve()
    assert [record[0] for record in ours] == list(range(1, 17))
    for (_, loss, norm, _), (_, other, other_norm, _) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(other, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=1e-4)


def _wait_until_open(port: int) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(f"nothing listens at port {port}")


def test_a_job_that_does_not_fit_fewer_nodes_is_refused(tmp_path):
    words = ("--nproc", "1", "--nnodes", "1:4", "--rdzv-endpoint", "127.0.0.1:1", "parallel.expert_parallel_size=2")
    with Job(tmp_path, "unfit", *words).started() as life:
        assert life.end() == 2
    (line,) = life.said().splitlines()
    assert line.startswith("maniple: error: --nnodes 1:4: with 1 node world size 1 is not a multiple of 2")
    assert line.endswith("; the job fits 2, 4")

"""Two launchers as two nodes. One is killed with its rank, and the other goes on alone, with the same global batch; one
comes late, and both go on."""

from __future__ import annotations

import socket
import time
from types import SimpleNamespace

import pytest
from tests.faults.launched import START_SECONDS, Job

pytestmark = [pytest.mark.distributed, pytest.mark.slow, pytest.mark.timeout(900)]


def _meeting() -> tuple[int, tuple[str, ...]]:
    """A free port, and the options of nodes that meet there."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    conf = "last_call_timeout=3,keep_alive_interval=1,join_timeout=200"
    return port, ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "a", "--rdzv-conf", conf)


def _same(ours: list[tuple], theirs: list[tuple]) -> None:
    for (_, loss, norm, _), (_, other, other_norm, _) in zip(ours, theirs, strict=True):
        assert loss == pytest.approx(other, rel=1e-6)
        assert norm == pytest.approx(other_norm, rel=1e-4)


def test_a_run_goes_on_with_fewer_nodes(tmp_path):
    port, meeting = _meeting()
    calm = Job(tmp_path, "calm", "--nproc", "2", "train.steps=16")
    calm.run()
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
    _same(ours, theirs)


def test_a_node_that_comes_is_taken_in(tmp_path):
    """No restart is spent on it: nothing has failed."""
    _, meeting = _meeting()
    steady = ("optimizer.decay_style=constant", "checkpoint.save_interval=0")
    job = Job(tmp_path, "grown", "--nproc", "1", "train.steps=100000", *steady, "--nnodes", "1:2", *meeting)
    with job.started(node="-a") as first:
        alone = first.wait_for(0, "forward", 8)
        with job.started(node="-b") as second:
            first.wait_for(0, "forward", 1, after=alone.pid)
            border = job.saved()[-1]  # where the one rank was asked to end
            second.wait_for(1, "forward", border + 4)
            for life in (first, second):
                life.process.terminate()
            codes = [life.end() for life in (first, second)]
            said = first.said() + second.said()
    assert codes == [0, 0], said
    assert "restarting 1 of 2 processes" in said, said
    ours, last = job.curve(), job.saved()[-1]
    assert last >= border + 4
    assert [record[0] for record in ours] == list(range(1, last + 1))
    calm = Job(tmp_path, "calm", "--nproc", "1", f"train.steps={last}", *steady)
    calm.run()
    _same(ours, calm.curve())


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
    assert line.startswith("maniple: error: --nnodes 1:4: with 1 node 1 processes, one a GPU, are not a multiple of 2")
    assert line.endswith("; the job fits 2, 4")


@pytest.mark.parametrize(("here", "waiting", "taken"), [(2, 1, 0), (2, 2, 2), (1, 1, 1), (2, 0, 0)])
def test_a_node_waits_while_the_job_would_not_fit(here, waiting, taken):
    from maniple.launch.agent import Agent

    agent = Agent.__new__(Agent)
    agent._fits, agent._worker_group = frozenset({1, 2, 4}), SimpleNamespace(group_world_size=here)
    assert agent._welcome(waiting) == taken

"""The helper that runs ranks must itself fail loudly."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.distributed_utils import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]  # the first test waits for the server's imports


def _sum(rank, world_size, start):
    x = torch.tensor([float(start + rank)])
    dist.all_reduce(x)
    return rank, world_size, x


def _one_fails(rank, world_size):
    if rank == 1:
        raise KeyError("the reason")
    dist.barrier()


def _one_hangs(rank, world_size):
    if rank == 0:
        time.sleep(600)
    dist.barrier()


def _one_dies(rank, world_size):
    if rank == 1:
        os._exit(7)
    time.sleep(600)


def _sees(rank, world_size):
    import maniple

    seen = getattr(maniple, "left_by_a_test", None), os.environ.get("LEFT_BY_A_TEST")
    maniple.left_by_a_test = True
    return seen


def _all_hang(rank, world_size):
    time.sleep(600)


def test_eight_ranks_that_know_nothing_of_earlier_ones(monkeypatch):
    assert run_ranks(_sees, 2) == [(None, None)] * 2
    monkeypatch.setenv("LEFT_BY_A_TEST", "1")  # unlike the server, they see this process's environment
    assert run_ranks(_sees, 8) == [(None, "1")] * 8


def test_a_job_that_hangs_outside_a_collective_ends():
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] of 2 gave no result in time"):
        run_ranks(_all_hang, 2, timeout=1)


def test_results_come_back_by_rank():
    results = run_ranks(_sum, 2, 10)
    assert [(r, w, x.item()) for r, w, x in results] == [(0, 2, 21.0), (1, 2, 21.0)]


@pytest.mark.parametrize(
    ("fn", "words"), [(_one_fails, "rank 1 of 2.*the reason"), (_one_dies, "exit code 7"), (_one_hangs, "rank 1 of 2")]
)
def test_failures_are_named_and_nothing_is_left(fn, words):
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        run_ranks(fn, 2, timeout=3)
    assert time.monotonic() - started < 60

"""The helper that runs ranks must itself fail loudly."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from tests.distributed_utils import run_ranks

pytestmark = pytest.mark.distributed


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

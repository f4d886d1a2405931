"""Ranks of one stage that differ by their place are among those that a dry run of a whole job runs."""

from __future__ import annotations

import pytest
from tests.distributed_utils import run_ranks
from tests.engines import test_all_ranks as all_ranks

PARALLEL = {
    "pipeline_parallel_size": 4,
    "pipeline_layout": "Et|t|t|mL",
    "tensor_parallel_size": 2,
    "expert_parallel_size": 4,
}


def broken(rank: int):
    """One more reduction, by the second tensor-parallel rank of the last stage alone."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state

    def reduce(chunks) -> None:
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        if last and parallel_state.get_tensor_model_parallel_rank() == 1:
            group = parallel_state.get_tensor_model_parallel_group()
            dist.all_reduce(torch.zeros(15, device="meta"), group=group)

    return all_ranks._before_statistics(reduce)


def both_worlds(rank: int, world_size: int) -> list[list[str]]:
    from tests.engines import jobs

    job = all_ranks.make_job(parallel=PARALLEL)
    with jobs.no_process_group():
        return [all_ranks.faults(job, all_ranks.card(), world, broken) for world in (16, 32)]


@pytest.mark.timeout(600)
def test_a_tensor_parallel_rank_of_the_last_stage_that_differs_is_found():
    for found in run_ranks(both_worlds, 1, timeout=400)[0]:
        assert found

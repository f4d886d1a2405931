"""Start and end of a process's part in the job: device, process groups, seeds."""

from __future__ import annotations

import gc
import math
import os
import random
from datetime import timedelta
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from maniple.config.layout import parse_layout
from maniple.config.schema import TrainConfig
from maniple.engines.megatron import cpu
from maniple.errors import UserError
from maniple.metrics import pulse


def pick_device(job: TrainConfig) -> torch.device:
    """This process's device; makes it Megatron-Core's. Raises UserError if a GPU was asked for and none is there."""
    if cpu.is_installed():
        return torch.device("cpu")
    if job.train.device == "gpu" and not torch.cuda.is_available():
        raise UserError(
            "train.device is gpu, but torch sees no GPU here: set train.device=cpu, or install its GPU build"
        )
    if job.train.device == "cpu" or not torch.cuda.is_available():
        cpu.install()
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"process {local_rank} of this node has no GPU: torch sees {torch.cuda.device_count()}; lower --nproc"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def start(job: TrainConfig, device: torch.device, *, slack: float = 0.0) -> None:
    """Joins the process group that torchrun describes (or a group of one); builds Megatron-Core's groups and seeds.

    slack: seconds that collectives may take beyond the job's timeout, where a watch ends the job at the timeout itself.
    """
    pulse.enter(pulse.MEETING)
    if not dist.is_initialized():
        timeout = timedelta(seconds=job.parallel.collective_timeout_seconds + slack)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout, device_id=device if backend == "nccl" else None)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    start_groups(job, slack=slack)
    pulse.enter(pulse.BUILDING)


def start_groups(job: TrainConfig, *, slack: float = 0.0) -> None:
    """Megatron-Core's groups and seeds over a process group that exists."""
    parallel = job.parallel
    virtual = parallel.virtual_pipeline_size or 1
    stages = parse_layout(parallel.pipeline_layout) if parallel.pipeline_layout else []
    if stages:
        virtual = len(stages) // parallel.pipeline_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,  # upstream refuses a size of 1
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        get_embedding_ranks=partial(_embedding_ranks, stages),
        distributed_timeout_minutes=math.ceil((parallel.collective_timeout_seconds + slack) / 60),
        create_gloo_process_groups=False,
    )
    seed_everything(job.train.seed)


def _embedding_ranks(stages: list[str], pipeline_ranks: list[int]) -> list[int]:
    """The ranks of a pipeline that hold copies of the embedding, whose gradients are summed: MTP layers have their own.

    Upstream's default (parallel_state.py, `default_embedding_ranks`) is the first and the last: with the MTP layers in
    another stage than the loss it leaves their copy out, and adds the output head's weight to the embedding instead.
    """
    holders = [
        stage % len(pipeline_ranks) for stage, layers in enumerate(stages) if "m" in layers and "L" not in layers
    ]
    first, last = pipeline_ranks[0], pipeline_ranks[holders[0] if holders else -1]
    return [first] if first == last else [first, last]


def seed_everything(seed: int) -> None:
    """One seed for all ranks of a data-parallel replica but for what tensor, expert and pipeline ranks draw apart."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    # forked trackers give dropout and initialisation of split matrices a stream of their own
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def stop_groups() -> None:
    """Leaves nothing of a job but the process group, so that another job can start in it.

    Upstream's `destroy_model_parallel` forgets its groups and leaves them open: each of Gloo's keeps its threads as
    long as anything refers to it. The last job's model does, in cycles; its rotary embeddings stay, with their group,
    in the cache of `forward`'s results (rotary_pos_embedding.py, yarn_rotary_pos_embedding.py); and parallel_state.py
    keeps one group that it does not forget.
    """
    for embedding in (RotaryEmbedding, YarnRotaryEmbedding):
        embedding.forward.cache_clear()
    parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
    gc.collect()
    groups = parallel_state._global_process_group_list or []
    parallel_state.destroy_model_parallel()
    for group in groups:
        if group is not None:  # stands for the default group
            dist.destroy_process_group(group)


def stop() -> None:
    stop_groups()
    if dist.is_initialized():
        dist.destroy_process_group()

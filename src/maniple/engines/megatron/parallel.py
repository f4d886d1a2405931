"""Start and end of a process's part in the job: device, process groups, seeds."""

from __future__ import annotations

import math
import os
import random
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

from maniple.config.layout import parse_layout
from maniple.config.schema import TrainConfig
from maniple.engines.megatron import cpu
from maniple.errors import UserError


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


def start(job: TrainConfig, device: torch.device) -> None:
    """Joins the process group that torchrun describes (or a group of one); builds Megatron-Core's groups and seeds."""
    if not dist.is_initialized():
        timeout = timedelta(seconds=job.parallel.collective_timeout_seconds)
        backend = "nccl" if device.type == "cuda" else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend, timeout=timeout, device_id=device if backend == "nccl" else None)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    start_groups(job)


def start_groups(job: TrainConfig) -> None:
    """Megatron-Core's groups and seeds over a process group that exists."""
    parallel = job.parallel
    virtual = parallel.virtual_pipeline_size or 1
    if parallel.pipeline_layout:
        virtual = len(parse_layout(parallel.pipeline_layout)) // parallel.pipeline_parallel_size
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor_parallel_size,
        pipeline_model_parallel_size=parallel.pipeline_parallel_size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,  # upstream refuses a size of 1
        context_parallel_size=parallel.context_parallel_size,
        expert_model_parallel_size=parallel.expert_parallel_size,
        expert_tensor_parallel_size=parallel.expert_tensor_parallel_size,
        distributed_timeout_minutes=math.ceil(parallel.collective_timeout_seconds / 60),
        create_gloo_process_groups=False,
    )
    seed_everything(job.train.seed)


def seed_everything(seed: int) -> None:
    """One seed for all ranks of a data-parallel replica but for what tensor, expert and pipeline ranks draw apart."""
    seed += 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    # forked trackers give dropout and initialisation of split matrices a stream of their own
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def stop_groups() -> None:
    """Leaves nothing of a job but the process group, so that another job can start in it."""
    parallel_state.destroy_model_parallel()
    MTPLossLoggingHelper.tracker.clear()  # one for the process, sized by its first model


def stop() -> None:
    stop_groups()
    if dist.is_initialized():
        dist.destroy_process_group()

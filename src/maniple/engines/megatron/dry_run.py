"""One step of one rank of a job of any size, on a laptop: the real model and schedule under fake tensors.

The process group is PyTorch's `fake` one, the tensors hold shapes only, and the all-to-all dispatcher takes balanced
splits, since counts that depend on data do not exist here. What is traced: parameters, gradient buffers, optimizer
state as allocated, and every activation and temporary that the step's operations make.
"""

from __future__ import annotations

import contextlib
import math
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch._C._distributed_c10d import FakeWork
from torch.utils._python_dispatch import TorchDispatchMode

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import cpu
from maniple.errors import UserError
from maniple.models.card import ModelCard


@dataclass(frozen=True)
class DryRun:
    """What one rank's step takes. Bytes as an allocator that rounds to 512 would count them."""

    rank: int
    world_size: int
    pipeline_stage: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    peak_bytes: int
    micro_batches_run: int
    micro_batches_a_step: int
    seconds: float

    @property
    def activation_bytes(self) -> int:
        return self.peak_bytes - self.parameter_bytes - self.gradient_bytes - self.optimizer_bytes


def trace(job: TrainConfig, card: ModelCard, rank: int, world_size: int) -> DryRun:
    """Builds rank `rank` of `world_size` and runs one step of it. Must be the first use of the engine in a process.

    Raises UserError for a rank outside the world.
    """
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} is not in a world of {world_size}: ranks are 0 to {world_size - 1}")
    started = time.monotonic()
    cpu.install()
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from maniple.engines.megatron import model, parallel, step
    from maniple.engines.megatron.memory import StorageMeter
    from maniple.engines.megatron.optimizer import build_optimizer

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    parallel.start_groups(job)
    # nothing is drawn, and the states that random.py's fork() compares would be fake
    tensor_parallel.get_cuda_rng_tracker().fork = lambda *name: contextlib.nullcontext()
    device = torch.device("cpu")
    meter = StorageMeter()
    with FakeTensorMode(allow_non_fake_inputs=True), meter, _CoalescedCollectives():
        # initialisation would draw random numbers, which do not exist here
        chunks = model.build_chunks(card, job, maniple_static_splits=True, perform_initialization=False)
        if chunks[0].config.mtp_standalone:
            raise UserError(
                "a dry run cannot trace a pipeline_layout with MTP and loss in different stages, whose messages have "
                "shapes that depend on the stage: put m and L together, e.g. ...|mL"
            )
        parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        for chunk in chunks:
            # made in their dtype and on their device already, and torch cannot swap fake parameters for converted ones
            chunk._apply = lambda fn, recurse=True, chunk=chunk: chunk
        chunks = model.wrap(chunks, job, device)
        gradient_bytes = sum(
            buffer.grad_data.untyped_storage().nbytes()
            for chunk in chunks
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        )
        static = meter.live
        with _objects_gathered_alike():
            optimizer, _ = build_optimizer(chunks, job)
        moments = [
            (torch.zeros_like(p), torch.zeros_like(p))
            for group in optimizer.param_groups
            for p in group["params"]
            if p.numel()
        ]
        optimizer_bytes = meter.live - static
        step.connect(chunks, optimizer, job)
        a_step = step.micro_batches(job)
        # memory is at its peak once the pipeline is full: more micro-batches repeat it
        run = min(a_step, _micro_batches_until_full(len(chunks)))
        short = job.model_copy(
            update={
                "train": job.train.model_copy(update={"global_batch_size": job.train.global_batch_size * run // a_step})
            }
        )
        step.run_schedule(chunks, [_endless_batches(job) for _ in chunks], short, device, forward_only=False)
        peak = meter.peak
        del moments
    result = DryRun(
        rank=rank,
        world_size=world_size,
        pipeline_stage=parallel_state.get_pipeline_model_parallel_rank(),
        parameters=parameters,
        parameter_bytes=static - gradient_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        peak_bytes=peak,
        micro_batches_run=run,
        micro_batches_a_step=a_step,
        seconds=time.monotonic() - started,
    )
    parallel.stop()
    return result


class _CoalescedCollectives(TorchDispatchMode):
    """Collectives that Megatron-Core issues in one bundle, for which PyTorch has no fake form: they change values only,
    so that nothing is left to do under fake tensors."""

    BUNDLED = ("allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_")

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d" and func._schema.name.removeprefix("c10d::") in self.BUNDLED:
            work = FakeWork()
            work.wait()
            return work.boxed()
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _objects_gathered_alike():
    """optimizer/__init__.py gathers the names of parameter groups as pickled objects, which the fake group cannot
    carry: every rank is taken to have this one's."""
    original = dist.all_gather_object

    def fill(object_list, obj, group=None):
        object_list[:] = [obj] * len(object_list)

    dist.all_gather_object = fill
    try:
        yield
    finally:
        dist.all_gather_object = original


def _micro_batches_until_full(chunks: int) -> int:
    """Micro-batches after which this stage holds as many activations as it ever will (Megatron-Core's schedules)."""
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    behind = stages - 1 - parallel_state.get_pipeline_model_parallel_rank()
    if chunks == 1:
        return behind + 2
    in_flight = 2 * behind + (chunks - 1) * stages + 1  # of single chunks, as in the interleaved schedule's warm-up
    return math.ceil(in_flight / chunks / stages) * stages


def _endless_batches(job: TrainConfig):
    shape = (job.train.micro_batch_size, job.data.sequence_length)
    while True:
        ids_BS = torch.zeros(shape, dtype=torch.int64)
        yield {"tokens": ids_BS, "labels": ids_BS, "position_ids": ids_BS, "loss_mask": torch.ones(shape)}


def run(job: TrainConfig, card: ModelCard, rank: int, world_size: int, *, as_json: bool = False) -> int:
    """Prints a dry run as a table, or as JSON on stdout. Returns the exit code."""
    result = trace(job, card, rank, world_size)
    if as_json:
        import dataclasses
        import json

        print(json.dumps(dataclasses.asdict(result) | {"activation_bytes": result.activation_bytes}))
        return 0
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{card.name}: rank {rank} of {world_size}, pipeline stage {result.pipeline_stage}")
    table.add_column("what")
    table.add_column("here", justify="right")
    table.add_row("parameters", f"{result.parameters:,}")
    for name, size in (
        ("parameter memory", result.parameter_bytes),
        ("gradient memory", result.gradient_bytes),
        ("optimizer memory", result.optimizer_bytes),
        ("activations and temporaries at the peak", result.activation_bytes),
        ("traced peak", result.peak_bytes),
    ):
        table.add_row(name, f"{size / 2**30:.2f} GiB")
    table.add_row("micro-batches traced / a step", f"{result.micro_batches_run} / {result.micro_batches_a_step}")
    table.add_row("took", f"{result.seconds:.1f} s")
    Console().print(table)
    return 0

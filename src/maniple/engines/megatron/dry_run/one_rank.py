"""One step of one rank of a job of any size, on a laptop: the real model and schedule on the meta device.

The process group is PyTorch's `fake` one, the tensors hold shapes only, and the all-to-all dispatcher takes balanced
splits, since counts that depend on data do not exist here. `trace` counts memory: parameters, gradient buffers,
optimizer state as allocated, and every activation and temporary that the step's operations make. `program_of` records
what the rank communicates.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state

from maniple.config.schema import TrainConfig
from maniple.engines.megatron import model, step
from maniple.engines.megatron.dry_run.exchange import LayerBytes, even_and_worst
from maniple.engines.megatron.dry_run.kept import Kept, OwnedMeter, table, watched
from maniple.engines.megatron.dry_run.meta import META, stand_in
from maniple.engines.megatron.dry_run.passes import CannotRepeat, remembered
from maniple.engines.megatron.dry_run.program import Program
from maniple.engines.megatron.optimizer import allocate, build_optimizer, in_host_memory
from maniple.errors import UserError
from maniple.hardware.units import binary_size
from maniple.models.card import ModelCard


@dataclass(frozen=True)
class DryRun:
    """What one rank's step takes. Bytes as an allocator that rounds to 512 would count them.

    optimizer_bytes: on the device; host_bytes: of its states in host memory.

    kept: what the forward pass of one micro-batch leaves for its backward pass, by layer and module, all model chunks
    one after the other; empty with `moe.overlap_exchange`. tokens: of a micro-batch on this rank.

    phase: what the rank is doing at the peak, `forward` or `backward`; peaks: the most in each; at_peak: what is there
    then beside parameters, gradients and optimizer, by module over all layers and micro-batches, the largest first.

    even, worst: what exchange and experts of one MoE layer take of one micro-batch, with the even load that the peak
    stands for, and if all tokens of all ranks chose this rank's experts; None without expert parallelism.
    """

    rank: int
    world_size: int
    pipeline_stage: int
    parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_bytes: int
    peak_bytes: int
    micro_batches_run: int
    micro_batches_a_step: int
    even: LayerBytes | None
    worst: LayerBytes | None
    kept: list[Kept]
    phase: str
    peaks: dict[str, int]
    at_peak: dict[str, int]
    tokens: int
    seconds: float

    @property
    def activation_bytes(self) -> int:
        return self.peak_bytes - self.parameter_bytes - self.gradient_bytes - self.optimizer_bytes


def trace(job: TrainConfig, card: ModelCard, rank: int, world_size: int) -> DryRun:
    """Builds rank `rank` of `world_size` and runs one step of it. In a process that is in no process group.

    Raises UserError for a rank outside the world.
    """
    if not 0 <= rank < world_size:
        raise UserError(f"rank {rank} is not in a world of {world_size}: ranks are 0 to {world_size - 1}")
    started = time.monotonic()
    meter = OwnedMeter()
    with stand_in(job, rank, world_size), meter:
        chunks = _build(card, job)
        parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        chunks = model.wrap(chunks, job, META)
        gradient_bytes = sum(
            buffer.grad_data.untyped_storage().nbytes()
            for chunk in chunks
            for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]
        )
        static = meter.live
        optimizer, _ = build_optimizer(chunks, job)
        allocate(optimizer)
        if away := in_host_memory(optimizer):
            meter.leave_out(away)
        optimizer_bytes = meter.live - static
        step.connect(chunks, optimizer, job)
        a_step = step.micro_batches(job)
        # memory is at its peak once the pipeline is full: more micro-batches repeat it
        run = min(a_step, _micro_batches_until_full(len(chunks)))
        meter.begin_step()
        with watched(chunks, meter) as kept:
            step.run_schedule(chunks, _batches(job, chunks), _cut(job, run), META, forward_only=False)
        peak, phase, peaks, holds = meter.peak, meter.phase, dict(meter.peaks), meter.holds.copy()
        parallel = job.parallel
        cut = parallel.context_parallel_size * parallel.tensor_parallel_size  # MoE needs sequence parallelism with TP
        tokens = job.train.micro_batch_size * job.data.sequence_length // cut
        even, worst = even_and_worst(chunks, tokens) or (None, None)
        stage = parallel_state.get_pipeline_model_parallel_rank()
    return DryRun(
        rank=rank,
        world_size=world_size,
        pipeline_stage=stage,
        parameters=parameters,
        parameter_bytes=static - gradient_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        host_bytes=sum(tensor.nbytes for tensor in away),
        peak_bytes=peak,
        micro_batches_run=run,
        micro_batches_a_step=a_step,
        even=even,
        worst=worst,
        kept=kept,
        phase=phase,
        peaks=peaks,
        at_peak=_by_module(holds),
        tokens=tokens,
        seconds=time.monotonic() - started,
    )


@dataclass(frozen=True)
class RankProgram:
    """What one rank communicates: making its model and optimizer, a training step and an evaluation."""

    program: Program
    parameters: int
    micro_batches_run: int
    micro_batches_a_step: int


def program_of(job: TrainConfig, card: ModelCard, rank: int, world_size: int, whole: bool = False) -> RankProgram:
    """As `trace`, for communication: a whole step, with the optimizer's own and the statistics, and an evaluation.

    With overlapped parameter gathers a second step follows, whose forward pass makes them. whole: every pass is run;
    otherwise those like an earlier one are taken from it (see `passes.py`).
    """
    try:
        return _program_of(job, card, rank, world_size, contextlib.nullcontext if whole else remembered)
    except CannotRepeat:
        return _program_of(job, card, rank, world_size, contextlib.nullcontext)


def _program_of(
    job: TrainConfig, card: ModelCard, rank: int, world_size: int, passes: Callable[[Any], AbstractContextManager]
) -> RankProgram:
    with stand_in(job, rank, world_size) as recorder, passes(recorder):
        chunks = _build(card, job)
        parameters = sum(p.numel() for chunk in chunks for p in chunk.parameters())
        chunks = model.wrap(chunks, job, META)
        optimizer, scheduler = build_optimizer(chunks, job)
        step.connect(chunks, optimizer, job)
        a_step = step.micro_batches(job)
        stages = parallel_state.get_pipeline_model_parallel_world_size()
        run = micro_batches_that_show_all(a_step, stages, len(chunks))
        batches = _batches(job, chunks)
        step.train_step(chunks, optimizer, scheduler, batches, _cut(job, run), META)
        # forward passes alone are all alike: two, or what an interleaved schedule needs, one a stage
        short = _cut(job, min(a_step, stages if len(chunks) > 1 else 2))
        short = short.model_copy(update={"train": short.train.model_copy(update={"eval_batches": 1})})
        step.evaluate(chunks, batches, short, META)
        if job.parallel.overlap_param_gather:
            step.train_step(chunks, optimizer, scheduler, batches, short, META)
        program = recorder.program()
    return RankProgram(program, parameters, run, a_step)


def micro_batches_that_show_all(a_step: int, stages: int, chunks: int) -> int:
    """Micro-batches after which more of them only repeat a part of every rank's program.

    1F1B: a stage warms up with at most `stages - 1` forward passes, then takes turns of one forward and one backward
    pass that are all alike. Interleaved with v chunks (Megatron-Core's `get_pp_rank_microbatches`): of v * M passes at
    most 2 * (stages - 1) + (v - 1) * stages are warm-up, and the turns repeat after v * stages of them, that is after
    `stages` micro-batches; with M = 3 * stages every stage has v * stages + 2 turns or more.
    """
    return min(a_step, stages + 2 if chunks == 1 else 3 * stages + a_step % stages)


def _by_module(holds: Counter) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (layer, module), size in holds.items():
        found[module if layer is not None or module.startswith("made in") else f"outside layers: {module}"] += size
    return {module: size for module, size in found.most_common() if size}


def _build(card: ModelCard, job: TrainConfig) -> list:
    # initialisation would draw random numbers, which do not exist here
    return model.build_chunks(card, job, maniple_static_splits=True, perform_initialization=False)


def _cut(job: TrainConfig, micro_batches: int) -> TrainConfig:
    """The job with as many micro-batches a step and data-parallel rank."""
    size = job.train.global_batch_size * micro_batches // step.micro_batches(job)
    return job.model_copy(update={"train": job.train.model_copy(update={"global_batch_size": size})})


def _batches(job: TrainConfig, chunks: list) -> list[Iterator[step.Batch]]:
    shape = (job.train.micro_batch_size, job.data.sequence_length)
    ids_BS = torch.zeros(shape, dtype=torch.int64)
    batch = {"tokens": ids_BS, "labels": ids_BS, "position_ids": ids_BS, "loss_mask": torch.ones(shape)}
    if not job.data.attend_across_documents:
        batch["documents"] = ids_BS.int()
    return [itertools.repeat(batch) for _ in chunks]


def _micro_batches_until_full(chunks: int) -> int:
    """Micro-batches after which this stage holds as many activations as it ever will (Megatron-Core's schedules).

    Interleaved: as many as are in flight, and a round of `stages` more, in whose turns messages for both directions
    are there beside them.
    """
    stages = parallel_state.get_pipeline_model_parallel_world_size()
    behind = stages - 1 - parallel_state.get_pipeline_model_parallel_rank()
    if chunks == 1:
        return behind + 2
    in_flight = 2 * behind + (chunks - 1) * stages + 1  # of single chunks, as in the interleaved schedule's warm-up
    return (math.ceil(in_flight / chunks / stages) + 1) * stages


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

    summary = Table(title=f"{card.name}: rank {rank} of {world_size}, pipeline stage {result.pipeline_stage}")
    summary.add_column("what")
    summary.add_column("here", justify="right")
    summary.add_row("parameters", f"{result.parameters:,}")
    for name, size in (
        ("parameter memory", result.parameter_bytes),
        ("gradient memory", result.gradient_bytes),
        ("optimizer memory", result.optimizer_bytes),
        *([("the same in host memory", result.host_bytes)] if result.host_bytes else []),
        (f"activations and temporaries at the peak, in {result.phase}", result.activation_bytes),
        ("traced peak", result.peak_bytes),
    ):
        summary.add_row(name, binary_size(size))
    for name, layer in (("even load", result.even), ("all tokens here", result.worst)):
        if layer is not None:
            said = f"{binary_size(layer.peak)}, {binary_size(layer.kept)} kept, {layer.rows:,} rows"
            summary.add_row(f"a layer's exchange and experts, {name}", said)
    summary.add_row("micro-batches traced / a step", f"{result.micro_batches_run} / {result.micro_batches_a_step}")
    summary.add_row("took", f"{result.seconds:.1f} s")
    Console().print(summary)
    Console().print(_table_of_peak(result))
    if result.kept:
        Console().print(table(result.kept, result.tokens))
    return 0


def _table_of_peak(result: DryRun) -> Any:
    """Of rich's: who made what is there at the peak."""
    from rich.table import Table

    made = Table(title=f"at the peak, in {result.phase}: all layers and micro-batches")
    made.add_column("module")
    made.add_column("bytes", justify="right")
    for module, size in result.at_peak.items():
        made.add_row(module, binary_size(size))
    return made
